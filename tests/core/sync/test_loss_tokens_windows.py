"""The beginning and end of a mean over tokens, the means that all ranks refuse, and the cost of counting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import make_collectives, weigh_by_tokens
from megastrategy.errors import LossTokensError
from tests.support.doubles import RecordingCollectives
from tests.support.ragged_tokens import batch
from tests.support.ranks import run_ranks, try_ranks
from tests.support.token_training import MODES, Setup, assert_same

# --- what is refused, on all ranks -----------------------------------------------------------------------------------


def refused(size: int, run: Callable[[Setup], None], match: str, **options: Any) -> None:
    """All ranks raise, with what each of them did, and go on with the next step."""

    def on_rank(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        setup = Setup(group, **options)
        with pytest.raises(LossTokensError, match=match):
            run(setup)
        setup.step(7, 2)
        return setup.grads()

    def fresh(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        setup = Setup(group, **options)
        setup.step(7, 2)
        return setup.grads()

    # A first window has another unit, by which fp16 rounds the tiny ones elsewhere.
    absolute = 1e-6 if options.get("grad_wire_dtype") == "fp16" else 1e-9
    assert_same(run_ranks(size, on_rank)[0], run_ranks(size, fresh)[0], absolute=absolute)


STRICT = {"find_unused_parameters": False, "overlap_grad_reduce": False}


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_counts_and_another_does_not(mode: str) -> None:
    def run(setup: Setup) -> None:
        setup.backward(0, counts=setup.rank != 1)

    refused(3, run, "rank 1 counted none.*rank 2 counted all", **MODES[mode])


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [True, False])
def test_a_microbatch_that_was_not_counted_beside_one_that_was(mode: str, first: bool) -> None:
    def run(setup: Setup) -> None:
        setup.backward(0, 0, counts=first, sync=False)
        setup.backward(0, 1, counts=not first)

    refused(2, run, "counted some of its losses and not others", **MODES[mode])


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_second_synchronised_backward_before_gradients_are_used(mode: str) -> None:
    def run(setup: Setup) -> None:
        setup.backward(0)
        setup.backward(1)

    refused(2, run, r"after a synchronised one, whose gradients were not used.*no_sync\(\)", **MODES[mode])


def test_gradients_that_are_dropped_in_part_between_two_microbatches() -> None:
    def run(setup: Setup) -> None:
        setup.backward(0, 0, sync=False)
        setup.module.twice.zero_grad()
        setup.backward(0, 1)

    refused(2, run, "dropped the gradients of some parameters between two microbatches")


class Dense(nn.Module):
    """All ranks use all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [STRICT, {"static_graph": True}, STRICT | {"bucket_size": 1}], ids=str)
def test_where_ranks_exchange_nothing_they_agree_to_count_in_the_first_backward(options: dict[str, Any]) -> None:
    """So no rank waits for an exchange that another does not take part in."""

    def begin(rank: int, group: ProcessGroup, counting: list[bool]) -> None:
        model = DistributedDataParallel(Dense(), DistributedDataParallelConfig(**options), group)
        for counts in counting:
            model.zero_grad()
            loss = model(torch.ones(2, 4))
            if counts:
                model.weigh_by_tokens(loss, rank + 1)
            loss.backward()

    run_ranks(2, lambda rank, group: begin(rank, group, [True, True, True]))
    run_ranks(2, lambda rank, group: begin(rank, group, [False, False, False]))
    for by_rank, match in (
        ([[True], [False]], "rank 0 counted all.*rank 1 counted none"),
        ([[True, True], [True, False]], "rank 0 counted all.*rank 1 counted none"),
        ([[False, True], [False, True]], "for the first time after a synchronised backward"),
    ):
        found = try_ranks(2, lambda rank, group, c=by_rank: begin(rank, group, c[rank]))
        for error in found:
            assert isinstance(error, LossTokensError)
            with pytest.raises(LossTokensError, match=match):
                raise error


# --- what begins a window --------------------------------------------------------------------------------------------


def last_grads(size: int, before: Callable[[Setup], object], **options: Any) -> list[Tensor | None]:
    """Gradients of one counted window, after whatever comes before."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        setup = Setup(group, **options)
        setup.optimizer.param_groups[0]["lr"] = 0.0  # steps are steps, and gradients stay comparable
        before(setup)
        for microbatch in range(2):
            setup.backward(6, microbatch, sync=microbatch == 1)
        return setup.grads()

    return run_ranks(size, run)[0]


def drop_in_mid_window(setup: Setup) -> None:
    setup.backward(0, 0, sync=False)
    setup.backward(0, 1, sync=False)
    setup.optimizer.zero_grad()


def drop_raw(setup: Setup) -> None:
    setup.backward(0, 0, sync=False)
    setup.module.zero_grad()


def drop_final_raw(setup: Setup) -> None:
    setup.backward(0)
    setup.module.zero_grad()


def failing_backward(setup: Setup) -> None:
    ids, labels = batch(setup.rank, 0, 0)

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    handle = setup.module.embedding.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        setup.model.weigh_by_tokens(setup.model(ids, labels, setup.rank), 7).backward()
    handle.remove()


def backward_that_fails_at_once(setup: Setup) -> None:
    """Before it has reached a parameter."""
    ids, labels = batch(setup.rank, 0, 0)

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    loss = setup.module(ids, labels, setup.rank)
    middle = setup.model.weigh_by_tokens(loss * 1.0, 700)
    loss.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        middle.backward()


def count_without_a_backward(setup: Setup) -> None:
    ids, labels = batch(setup.rank, 0, 0)
    setup.model.weigh_by_tokens(setup.module(ids, labels, setup.rank), 1000)


def uncounted_step(setup: Setup) -> None:
    setup.backward(0, counts=False)
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def counted_and_uncounted_steps(setup: Setup) -> None:
    setup.step(0, 2)
    setup.optimizer.step()
    uncounted_step(setup)
    setup.step(1, 2)
    setup.optimizer.step()


def steps_without_a_drop(setup: Setup) -> None:
    """Gradients that were used are not averaged with later ones, and kept gradients are dropped in the end."""
    setup.step(0, 2)
    setup.optimizer.step()
    setup.backward(3)
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def several_uncounted_backwards(setup: Setup) -> None:
    setup.step(0, 1)
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    setup.backward(3, counts=False)
    setup.backward(4, counts=False)
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def evaluation(setup: Setup) -> None:
    setup.module.eval()
    with torch.no_grad():
        ids, labels = batch(setup.rank, 0, 0)
        setup.model.weigh_by_tokens(setup.model(ids, labels, setup.rank), 3)
    setup.module.train()


def gradient_by_autograd(setup: Setup) -> None:
    """A weighed loss whose gradients torch.autograd.grad returns is not in the window."""
    ids, labels = batch(setup.rank, 3, 0)
    loss = setup.model.weigh_by_tokens(setup.module(ids, labels, setup.rank), 100)
    torch.autograd.grad(loss, setup.module.twice.weight)


WINDOW_BEGINS = [
    drop_in_mid_window,
    drop_raw,
    drop_final_raw,
    failing_backward,
    backward_that_fails_at_once,
    count_without_a_backward,
    uncounted_step,
    counted_and_uncounted_steps,
    steps_without_a_drop,
    several_uncounted_backwards,
    evaluation,
    gradient_by_autograd,
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("before", WINDOW_BEGINS, ids=lambda before: before.__name__)
@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce", "flattened"])
def test_a_window_has_the_counts_of_its_own_backwards(mode: str, before: Callable[[Setup], object]) -> None:
    def then_drop(setup: Setup) -> None:
        before(setup)
        if before is counted_and_uncounted_steps:
            setup.optimizer.zero_grad()

    assert_same(last_grads(2, then_drop, **MODES[mode]), last_grads(2, lambda setup: None, **MODES[mode]))


@pytest.mark.parametrize("who", ["model", "optimizer"])
@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_gradients_that_were_zeroed_in_place_are_gone(mode: str, synced: bool, who: str) -> None:
    def before(setup: Setup) -> None:
        setup.backward(0, sync=synced)
        (setup.model if who == "model" else setup.optimizer).zero_grad(set_to_none=False)

    found = last_grads(2, before, **MODES[mode])
    for mine, theirs in zip(found, last_grads(2, lambda setup: None, **MODES[mode]), strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_two_optimizers_that_take_turns_have_a_window_each() -> None:
    """As in a GAN: what the first has stepped with stays where it is, and is read by loggers, while the second's are
    reduced."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = nn.ModuleDict({"first": Dense(), "second": Dense()})
        module.forward = lambda name, x: module[name](x)  # type: ignore[assignment]
        model = DistributedDataParallel(module, DistributedDataParallelConfig(), group)
        optimizers = {
            name: DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.01), model)
            for name, part in module.items()
        }
        kept: dict[str, Tensor | None] = {}
        for step in range(3):
            for name in ("first", "second"):
                for other, part in module.items():
                    part.requires_grad_(other == name)
                optimizers[name].zero_grad()
                x = torch.full((2, 4), 1.0 + rank + step)
                expected = (
                    sum((r + 1) * grad_of(module[name], torch.full((2, 4), 1.0 + r + step)) for r in range(2)) / 3
                )
                model.weigh_by_tokens(model(name, x), rank + 1).backward()
                found = model.full_grad(module[name].layers[0].weight)
                assert found is not None
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
                if name == "second":
                    stayed = model.full_grad(module["first"].layers[0].weight)
                    torch.testing.assert_close(stayed, kept["first"], rtol=1e-6, atol=0.0)
                optimizers[name].step()
                kept[name] = found

    run_ranks(2, run)


def grad_of(module: nn.Module, x: Tensor) -> Tensor:
    weight = module.layers[0].weight  # type: ignore[union-attr,index]
    [grad] = torch.autograd.grad(module(x), weight)
    return grad


def test_parameters_that_join_later_and_those_that_stay_frozen() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = Dense()
        first = module.layers[0]
        first.requires_grad_(False)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=1), group)
        for step in range(4):
            if step == 2:
                first.requires_grad_(True)
            model.zero_grad()
            inputs = [torch.full((2, 4), 1.0 + r) for r in range(2)]
            weight = module.layers[0 if step >= 2 else 2].weight
            expected = sum((r + 1) * torch.autograd.grad(module(inputs[r]), weight)[0] for r in range(2)) / 3
            model.weigh_by_tokens(model(inputs[rank]), rank + 1).backward()
            torch.testing.assert_close(model.full_grad(weight), expected, rtol=1e-5, atol=1e-7)

    run_ranks(2, run)


def test_two_models_of_one_loss_that_end_their_windows_apart() -> None:
    """The first one's mean is known in the middle of the second one's window, whose losses all have one unit."""

    def run(rank: int, group: ProcessGroup) -> None:
        modules = [Dense(), Dense()]
        # One queue for both: a group that was made by hand is no group of each model's own.
        collectives = make_collectives(group, torch.device("cpu"))
        models = [DistributedDataParallel(module, collectives=collectives) for module in modules]
        inputs = [[torch.full((2, 4), 1.0 + r + 0.5 * number) for r in range(2)] for number in range(3)]
        counts = [[3000 * (r + 1) + 7000 * number for r in range(2)] for number in range(3)]

        def expected(module: Dense, numbers: Sequence[int]) -> Tensor:
            pairs = [(counts[number][r], inputs[number][r]) for number in numbers for r in range(2)]
            return sum(n * grad_of(module, x) for n, x in pairs) / sum(n for n, _ in pairs)

        for number, syncs in enumerate(([False, False], [True, False], [True, True])):
            if number == 2:
                models[0].zero_grad()
            with contextlib.ExitStack() as stack:
                for model, sync in zip(models, syncs, strict=True):
                    if not sync:
                        stack.enter_context(model.no_sync())
                loss = sum(model(inputs[number][rank]) for model in models)
            weigh_by_tokens(loss, counts[number][rank], models).backward()
            for model, module, sync, numbers in zip(models, modules, syncs, ([[0, 1], [2]], [[0, 1, 2]]), strict=True):
                if sync:
                    found = model.full_grad(module.layers[0].weight)
                    wanted = expected(module, numbers[-1] if number == 2 else numbers[0])
                    # The losses are not divided by the number of microbatches, and means are added up, as ever.
                    num_added = {0: 2, 1: 1}[number - 1] if model is models[0] else 3
                    torch.testing.assert_close(found, num_added * wanted, rtol=1e-5, atol=1e-7)
        collectives.close()

    run_ranks(2, run)


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_one_reduction_a_bucket_and_nothing_where_nobody_counts() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, recording=True)
        assert isinstance(setup.collectives, RecordingCollectives)
        setup.step(0, 1, counts=False)
        weight = setup.module.twice.weight
        assert not torch.autograd.graph.get_gradient_edge(weight).node.metadata
        calls = []
        for counts in (False, True):
            setup.optimizer.zero_grad()
            setup.collectives.calls.clear()
            setup.step(4, 3, counts=counts)
            calls.append([(call.name, call.nbytes) for call in setup.collectives.calls])
        assert calls[1] == [*calls[0], ("all_reduce_max", 2 * 12)], "and the sums of both ranks, between hosts"

    run_ranks(2, run)


# --- gradients that come in other ways -------------------------------------------------------------------------------
