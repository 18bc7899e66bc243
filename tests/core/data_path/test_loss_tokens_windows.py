"""The beginning and end of a mean over tokens, the means that all ranks refuse, and the cost of counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
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

    assert_same(run_ranks(size, on_rank)[0], run_ranks(size, fresh)[0])


@pytest.mark.parametrize("mode", ["reduce-scatter", "forward", "all-reduce"])
def test_one_rank_counts_and_another_does_not(mode: str) -> None:
    def run(setup: Setup) -> None:
        setup.backward(0, counts=setup.rank != 1)

    refused(3, run, "rank 1 counted none.*rank 2 counted all", **MODES[mode])


@pytest.mark.parametrize("mode", ["reduce-scatter", "all-reduce"])
def test_counting_some_microbatches_is_refused(mode: str) -> None:
    def run(setup: Setup) -> None:
        setup.backward(0, 0, sync=False)
        setup.backward(0, 1, counts=False)

    refused(2, run, "counted some of its losses and not others", **MODES[mode])


@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled"])
def test_second_synced_backward_with_tokens_is_refused(mode: str) -> None:
    def run(setup: Setup) -> None:
        setup.backward(0)
        setup.backward(1)

    refused(2, run, r"after a synchronised one, whose gradients were not used.*no_sync\(\)", **MODES[mode])


class Dense(nn.Module):
    """All ranks use all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def test_ranks_agree_to_count_in_first_backward() -> None:
    """So no rank waits for an exchange that another does not take part in."""

    def begin(rank: int, group: ProcessGroup, counting: list[bool]) -> None:
        config = DistributedDataParallelConfig(find_unused_parameters=False, overlap_grad_reduce=False)
        model = DistributedDataParallel(Dense(), config, group)
        for counts in counting:
            model.zero_grad()
            loss = model(torch.ones(2, 4))
            if counts:
                model.count_tokens(rank + 1)
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


def last_grads(before: Callable[[Setup], object], **options: Any) -> list[Tensor | None]:
    """Gradients of one counted window, after whatever comes before."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        setup = Setup(group, **options)
        setup.optimizer.param_groups[0]["lr"] = 0.0  # steps are steps, and gradients stay comparable
        before(setup)
        for microbatch in range(2):
            setup.backward(6, microbatch, sync=microbatch == 1)
        return setup.grads()

    return run_ranks(2, run)[0]


def drop_in_mid_window(setup: Setup) -> None:
    setup.backward(0, 0, sync=False)
    setup.backward(0, 1, sync=False)
    setup.optimizer.zero_grad()


def drop_final_raw(setup: Setup) -> None:
    setup.backward(0)
    setup.module.zero_grad()


def count_without_a_backward(setup: Setup) -> None:
    setup.model.count_tokens(1000)


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
    setup.optimizer.zero_grad()


def several_uncounted_backwards(setup: Setup) -> None:
    setup.step(0, 1)
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    setup.backward(3, counts=False)
    setup.backward(4, counts=False)
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def gradient_by_autograd(setup: Setup) -> None:
    """A loss whose gradients torch.autograd.grad returns is not in the window."""
    ids, labels = batch(setup.rank, 3, 0)
    setup.model.count_tokens(100)
    loss = setup.module(ids, labels, setup.rank)
    torch.autograd.grad(loss, setup.module.twice.weight)


@pytest.mark.parametrize(
    ("mode", "before"),
    [
        ("reduce-scatter", drop_in_mid_window),
        ("reduce-scatter", count_without_a_backward),
        ("reduce-scatter", counted_and_uncounted_steps),
        ("reduce-scatter", several_uncounted_backwards),
        ("reduce-scatter", gradient_by_autograd),
        ("all-reduce", drop_final_raw),
    ],
)
def test_a_window_has_the_counts_of_its_own_backwards(mode: str, before: Callable[[Setup], object]) -> None:
    assert_same(last_grads(before, **MODES[mode]), last_grads(lambda setup: None, **MODES[mode]))


@pytest.mark.parametrize(
    ("mode", "synced", "who"),
    [("reduce-scatter", False, "model"), ("pooled", True, "optimizer"), ("all-reduce", False, "model")],
)
def test_gradients_that_were_zeroed_in_place_are_gone(mode: str, synced: bool, who: str) -> None:
    def before(setup: Setup) -> None:
        setup.backward(0, sync=synced)
        (setup.model if who == "model" else setup.optimizer).zero_grad(set_to_none=False)

    found = last_grads(before, **MODES[mode])
    for mine, theirs in zip(found, last_grads(lambda setup: None, **MODES[mode]), strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_two_optimizers_have_a_token_window_each() -> None:
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
                model.count_tokens(rank + 1)
                (model(name, x) * (rank + 1)).backward()
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


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_counting_costs_one_exchange() -> None:
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
        assert calls[1] == [*calls[0], ("all_reduce_max", 2 * 8)], "and the numbers of both ranks, between hosts"

    run_ranks(2, run)
