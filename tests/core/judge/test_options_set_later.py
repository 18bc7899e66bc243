"""An option that is set after the wrap, by hand, by a schedule or by a loaded state: what a test at the wrap could
not see is tested before the step that would use it."""

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
from megastrategy.core.judge import GroupClasses
from tests.support.gradients import batch
from tests.support.models import two_layers
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


class DecaysLater(CountsOnState):
    """Its state is made at construction, and between steps it is that of shards."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(param, grad + group.get("weight_decay", 0.0) * param.detach(), state, group)


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


CONFIG = DistributedDataParallelConfig(bucket_size=100)


def train(model: Any, optimizer: Any, rank: int, set_later: SetLater) -> None:
    for step in range(6):
        if step == 3:
            set_later(optimizer)
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("set_later", [in_all_groups(weight_decay=0.1), in_the_last_group, by_a_loaded_state])
def test_option_coupling_elements_is_refused_at_step(set_later: SetLater) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, CONFIG, group)
        optimizer = DistributedOptimizer(Lars(groups_of(module)), model)
        said = r"weight_decay=0\.1, which was 0\.0 before.*use_distributed_optimizer=False"
        with pytest.raises(OptimizerNotShardableError, match=said):
            train(model, optimizer, rank, set_later)
        assert optimizer.num_steps == (3, 3)
        with pytest.raises(OptimizerNotShardableError, match=said):  # as often as it is called
            optimizer.step()
        in_all_groups(weight_decay=0.0)(optimizer)
        optimizer.step()
        assert optimizer.num_steps == (4, 4)

    run_ranks(2, run)


CHANGES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], SetLater]] = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1), in_all_groups(momentum=0.9, weight_decay=0.1)),
    "beta": (lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.9)), in_all_groups(betas=(0.9, 0.99))),
    "loaded": (lambda p: torch.optim.SGD(p, lr=0.1), by_a_loaded_state),
    "state-at-construction": (
        lambda groups: DecaysLater([{**group, "weight_decay": 0.0} for group in groups]),
        in_the_last_group,
    ),
    "counts-in-its-groups": (ScheduleFree, in_all_groups(weight_decay=0.1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_options_set_later_equal_torch_ddp(name: str) -> None:
    make, set_later = CHANGES[name]

    def started(optimizer: Any) -> Any:
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    def run(rank: int, group: ProcessGroup) -> None:
        theirs, ours, plain = two_layers(), two_layers(), two_layers()
        train(TorchDDP(theirs, process_group=group), started(make(groups_of(theirs))), rank, set_later)
        model = DistributedDataParallel(ours, CONFIG, group)
        train(model, started(DistributedOptimizer(make(groups_of(ours)), model)), rank, set_later)
        train(TorchDDP(plain, process_group=group), started(make(groups_of(plain))), rank, lambda _: None)
        assert not all(map(torch.equal, theirs.parameters(), plain.parameters())), "nothing was set"
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(param, other)

    run_ranks(2, run)


def test_removed_group_is_not_compared() -> None:
    optimizer = Lars(groups_of(two_layers()))
    classes = GroupClasses(optimizer, torch.device("cpu"), torch.float32, "auto")
    optimizer.param_groups.pop()
    classes.update()
