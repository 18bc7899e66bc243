"""An option that is set after the wrap, by hand, by a schedule or by a loaded state: what trials at the wrap could not
see is tried before the step that would use it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import OptimizerNotShardableError
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.notes import Notes
from tests.support.optimizers import Simple
from tests.support.optimizers_with_methods import ScheduleFree
from tests.support.prepared_optimizers import CountsOnState
from tests.support.ranks import run_ranks

SetLater = Callable[[Any], None]
"""Sets options of an optimizer between two steps."""


class Lars(Simple):
    """Takes norms where there is a decay alone."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{"lr": 0.1, "weight_decay": 0.0, **options})

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = grad + group["weight_decay"] * param
        if group["weight_decay"] != 0:
            update = update * (param.norm() / update.norm())
        param.sub_(update, alpha=group["lr"])


class Word(Simple):
    """Its coupling hides behind a word, a flag, None and the second number of a pair."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, scale="none", by_row=False, most=None, pair=(0.9, 0))

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        couples = group["scale"] == "norm" or group["by_row"] or group["most"] is not None or group["pair"][1] != 0
        param.sub_(grad / grad.norm() if couples else grad, alpha=group["lr"])


class Off(Simple):
    """Coupling of elements is off: by a sign, by infinity, by an entry that is missing, by its attributes."""

    clips = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, most=-1.0, largest=float("inf"))
        self.trusts = 0

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        by_entry = group["most"] > 0 or group["largest"] < 1e9 or group.get("by_norm", False)
        couples = by_entry or self.clips or self.trusts or getattr(self, "adapts", False)
        param.sub_(grad / grad.norm() if couples else grad, alpha=group["lr"])


class WarmsUp(Simple):
    """Makes its state in its first 20 steps, more than a trial has, and counts on it afterwards."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.steps, self.is_warm = 0, False

    def step(self, closure: Any = None) -> None:
        super().step()
        self.steps += 1
        self.is_warm = self.steps >= 20
        if self.is_warm:
            for group in self.param_groups:
                group["warm"] = True

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not self.is_warm:
            state["sum"] = torch.zeros_like(param)
        param.sub_(state["sum"].add_(grad), alpha=group["lr"])


class DecaysLater(CountsOnState):
    """Its state is made at construction, and between steps it is that of shards."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(param, grad + group.get("weight_decay", 0.0) * param.detach(), state, group)


class BeginsAtZero(Simple):
    """Makes its state in the first step that its groups count, as D-Adaptation does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, k=0, weight_decay=0.0)

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] += 1

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["k"] == 0:
            state["sum"] = torch.zeros_like(param)
        state["sum"].add_(grad).add_(param, alpha=group["weight_decay"])
        param.sub_(state["sum"], alpha=group["lr"])


class Counting(torch.optim.SGD):
    """Counts the calls of all its copies."""

    calls: Notes

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls.append(1)
        return super().step(closure)


def in_all_groups(**options: Any) -> SetLater:
    def set_later(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group.update(options)

    return set_later


def in_the_last_group(optimizer: Any) -> None:
    optimizer.param_groups[-1]["weight_decay"] = 0.1


def by_a_loaded_state(optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group["weight_decay"] = 0.1
    optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [{"params": params[:2]}, {"params": params[2:]}]


def config(*, sharded: bool = True) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(bucket_size=100, use_distributed_optimizer=sharded)


def train(model: Any, optimizer: Any, rank: int, set_later: SetLater) -> None:
    for step in range(6):
        if step == 3:
            set_later(optimizer)
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("set_later", [in_all_groups(weight_decay=0.1), in_the_last_group, by_a_loaded_state])
def test_an_option_that_couples_elements_is_refused_at_the_step_that_would_use_it(set_later: SetLater) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, config(), group)
        optimizer = DistributedOptimizer(Lars(groups_of(module)), model)
        said = r"weight_decay=0\.1, which was 0\.0 when it was wrapped.*use_distributed_optimizer=False"
        with pytest.raises(OptimizerNotShardableError, match=said):
            train(model, optimizer, rank, set_later)
        assert optimizer.num_steps == (3, 3)
        with pytest.raises(OptimizerNotShardableError, match=said):  # as often as it is tried
            optimizer.step()
        in_all_groups(weight_decay=0.0)(optimizer)
        optimizer.step()
        assert optimizer.num_steps == (4, 4)

    run_ranks(2, run)


OF_WORD: list[dict[str, Any]] = [{"scale": "norm"}, {"by_row": True}, {"most": 1.0}, {"pair": (0.9, 1)}]
OF_OFF: list[dict[str, Any]] = [{"most": 1.0}, {"largest": 1.0}, {"by_norm": True}]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "options"), [(Word, options) for options in OF_WORD] + [(Off, options) for options in OF_OFF], ids=str
)
def test_a_word_a_flag_a_sign_an_end_of_infinity_and_a_new_entry_are_looked_at(
    kind: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, config(), group)
        with pytest.raises(OptimizerNotShardableError, match=next(iter(options))):
            train(model, DistributedOptimizer(kind(module.parameters()), model), rank, in_all_groups(**options))

    run_ranks(2, run)


@pytest.mark.parametrize("name", ["clips", "trusts", "adapts"])
@pytest.mark.parametrize("through", ["wrapper", "user's own"])
def test_an_attribute_that_is_set_is_an_option(name: str, through: str) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, config(), group)
        inner = Off(module.parameters())
        optimizer = DistributedOptimizer(inner, model)
        of: Any = optimizer if through == "wrapper" else inner
        with pytest.raises(OptimizerNotShardableError, match=f"attribute {name}=1, which was .* before"):
            train(model, optimizer, rank, lambda _: setattr(of, name, 1))
        assert optimizer.num_steps == (3, 3)
        setattr(inner, name, 0)
        optimizer.step()

    run_ranks(2, run)


def test_what_its_own_step_sets_late_is_not_tried() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        theirs, ours = two_layers(), two_layers()
        model = DistributedDataParallel(ours, config(), group)
        optimizer = DistributedOptimizer(WarmsUp(ours.parameters(), 0.01), model)
        reference, of_theirs = TorchDDP(theirs, process_group=group), WarmsUp(theirs.parameters(), 0.01)
        for _ in range(4):
            train(reference, of_theirs, rank, lambda _: None)
            train(model, optimizer, rank, lambda _: None)
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(param, other)

    run_ranks(2, run)


CHANGES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], SetLater]] = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1), in_all_groups(momentum=0.9, weight_decay=0.1)),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), in_all_groups(nesterov=True, maximize=True)),
    "decay": (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0), in_the_last_group),
    "decay-adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), in_the_last_group),
    "beta": (lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.9)), in_all_groups(betas=(0.9, 0.99))),
    "loaded": (lambda p: torch.optim.SGD(p, lr=0.1), by_a_loaded_state),
    "state-at-construction": (
        lambda groups: DecaysLater([{**group, "weight_decay": 0.0} for group in groups]),
        in_the_last_group,
    ),
    "begins-at-zero": (BeginsAtZero, in_the_last_group),
    "counts-in-its-groups": (ScheduleFree, in_all_groups(weight_decay=0.1)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("sharded", [True, False], ids=["reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("name", CHANGES)
def test_other_options_may_be_set_at_any_time_and_change_what_they_change_under_torch_ddp(
    name: str, sharded: bool
) -> None:
    make, set_later = CHANGES[name]

    def started(optimizer: Any) -> Any:
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    def run(rank: int, group: ProcessGroup) -> None:
        theirs, ours, plain = two_layers(), two_layers(), two_layers()
        train(TorchDDP(theirs, process_group=group), started(make(groups_of(theirs))), rank, set_later)
        model = DistributedDataParallel(ours, config(sharded=sharded), group)
        train(model, started(DistributedOptimizer(make(groups_of(ours)), model)), rank, set_later)
        train(TorchDDP(plain, process_group=group), started(make(groups_of(plain))), rank, lambda _: None)
        assert not all(map(torch.equal, theirs.parameters(), plain.parameters())), "nothing was set"
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(param, other)

    run_ranks(2, run)


def test_with_all_reduce_every_option_is_the_users_affair() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        theirs, ours = two_layers(), two_layers()
        train(TorchDDP(theirs, process_group=group), Lars(groups_of(theirs)), rank, in_the_last_group)
        model = DistributedDataParallel(ours, config(sharded=False), group)
        train(model, DistributedOptimizer(Lars(groups_of(ours)), model), rank, in_the_last_group)
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))

    run_ranks(2, run)


def test_trials_are_made_for_terms_that_are_new_and_once() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        kind = type("Counting", (Counting,), {"calls": Notes()})
        module = two_layers()
        model = DistributedDataParallel(module, config(), group)
        optimizer = DistributedOptimizer(kind(groups_of(module), lr=0.1, weight_decay=0.1), model)
        numbers: list[int] = []
        for step, options in enumerate(
            [
                {},
                {"lr": 0.01, "weight_decay": 0.2},
                {"weight_decay": 0.0},
                {"momentum": 0.9},
                {"momentum": 0.8, "weight_decay": 0.3},
                {"momentum": 0.0},
                {"momentum": 0.7},
            ]
        ):
            in_all_groups(**options)(optimizer)
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            before = len(kind.calls)
            optimizer.step()
            numbers.append(len(kind.calls) - before)
        assert [number > min(numbers) for number in numbers] == [False, False, False, True, False, False, False]

    run_ranks(2, run)


def test_groups_that_are_assigned_are_tried_as_those_that_are_added() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, config(), group)
        optimizer = DistributedOptimizer(Lars(groups_of(module)[:1]), model)
        optimizer.param_groups = [*optimizer.param_groups, {**groups_of(module)[1], "lr": 0.1, "weight_decay": 0.1}]
        model(batch(rank, 0)).square().mean().backward()
        optimizer.step()
        joined = [model.engine.index_by_id[id(param)] for param in optimizer.param_groups[1]["params"]]
        assert sorted(optimizer._impl.shard_set.whole.indices) == sorted(joined), "norms of whole parameters were found"

    run_ranks(2, run)
