"""A model that registers its layers in another order than it runs them: after the first synchronised backward its
buckets are filled in the order in which gradients arrive, where that makes a difference, and are launched in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.events import Event, EventKind
from megastrategy.core.layout.layout import BufferLayout
from tests.support.layers_in_any_order import Layers, adamw, batch, momentum, moves, wrap
from tests.support.models import two_layers
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_state


@pytest.mark.parametrize(("reverse", "size", "sharded"), [(True, 2, True), (False, 3, False)])
def test_buckets_launch_early_from_second_step(reverse: bool, size: int, sharded: bool) -> None:
    """Also if the layers run in the order of registration: behind them is one that is never used."""

    def launched_after(events: list[Event]) -> list[int]:
        """How many gradients had arrived when each bucket was launched."""
        arrived, counts = 0, []
        for event in events:
            arrived += event.kind is EventKind.GRAD_READY
            if event.kind is EventKind.REDUCE_START:
                counts.append(arrived)
        return counts

    def run(rank: int, group: ProcessGroup) -> None:
        model, events, _ = wrap(group, Layers(reverse=reverse), use_distributed_optimizer=sharded)
        optimizer = DistributedOptimizer(adamw(model), model)
        by_step = []
        for step in range(3):
            events.clear()
            model(batch(rank, step)).backward()
            by_step.append(launched_after(events))
            assert moves(events) == (step == 0)
            optimizer.step()
            optimizer.zero_grad()
        used = 13  # of 15: one layer is never used
        assert min(by_step[0]) == used, "nothing could go before the unused layer was known to be unused"
        for counts in by_step[1:]:
            assert counts[0] < used / 2
            # all wait for no more than their own, except the bucket of the last gradient and that of the unused layer
            assert len(counts) > 5
            assert max(counts[:-2]) < used

    run_ranks(size, run)


@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_other_orders_become_that_of_rank_0(find_unused_parameters: bool) -> None:
    """Also if it is rank 0 that is content: then everything stays, on all ranks."""
    upwards, downwards = [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]

    def run(rank: int, group: ProcessGroup, orders: list[list[int]]) -> tuple[int, list[str], BufferLayout]:
        module = Layers(reverse=False)
        module.order = orders[rank]
        module.never.requires_grad_(False)
        model, events, _ = wrap(group, module, find_unused_parameters=find_unused_parameters)
        optimizer = DistributedOptimizer(adamw(model), model)
        for step in range(3):
            model(batch(rank, step)).backward()
            optimizer.step()
        names = [model.layout.params[index].name for bucket in model.layout.buckets for index in bucket.params]
        return moves(events), [name for name in names if name.endswith("weight")], model.layout

    mixed = [0, 2, 4, 1, 3, 5]
    for orders in ([downwards, mixed, upwards], [upwards, downwards, mixed]):
        outcomes = run_ranks(3, lambda rank, group, orders=orders: run(rank, group, orders))
        for num_moves, weights, layout in outcomes:
            assert num_moves == (orders[0] == downwards)
            assert weights == [f"layers.{number}.weight" for number in orders[0][::-1]], "the last to run comes first"
            assert layout == outcomes[0][2]


class InAnyOrder(nn.Module):
    """Three scales, used in any order; their gradients arrive in the opposite one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(3) for _ in range(3)])

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for number in order:
            x = torch.tanh(self.scales[number] * x)
        return x.sum()


def test_complete_bucket_waits_for_its_turn() -> None:
    def train(rank: int, group: ProcessGroup) -> list[tuple[EventKind, int]]:
        model, events, _ = wrap(group, InAnyOrder(), bucket_size=1)
        model(torch.ones(3), (0, 1, 2)).backward()
        events.clear()
        model(torch.ones(3), (0, 2, 1)).backward()
        model.close()
        return [(e.kind, e.index) for e in events if e.kind in (EventKind.GRAD_READY, EventKind.REDUCE_START)]

    ready, start = EventKind.GRAD_READY, EventKind.REDUCE_START
    for events in run_ranks(2, train):
        assert events == [(ready, 1), (ready, 2), (start, 0), (start, 1), (ready, 0), (start, 2)]


# --- the ranges of a step in torch.profiler ---------------------------------------------------------------------------


def names_of_a_step(rank: int, group: ProcessGroup) -> list[str]:
    """Ours on rank 0, in the order in which they began; on others the numbers of the buckets."""
    module = two_layers()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100), group)
    optimizer = DistributedOptimizer(torch.optim.AdamW(module.parameters()), model)

    def step() -> None:
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()

    step()  # buckets may move once
    if rank > 0:
        step()
        return [f"{bucket.index}" for bucket in model.layout.buckets]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    ours = [event for event in profile.events() if event.name.startswith("megastrategy::")]
    return [event.name for event in sorted(ours, key=lambda event: event.time_range.start)]


def test_a_step_is_drawn_bucket_by_bucket() -> None:
    shown, buckets = run_ranks(2, names_of_a_step)
    assert len(buckets) > 1
    reductions = [f"megastrategy::reduce {bucket}" for bucket in buckets]
    gathers = [f"megastrategy::gather {bucket}" for bucket in reversed(buckets)]
    waits = ["megastrategy::wait for gradients", "megastrategy::wait for weights"]
    assert shown == [*reductions, waits[0], "megastrategy::step", *gathers, waits[1]]


# --- checkpoints do not notice ---------------------------------------------------------------------------------------


Saved = tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]
"""Weights, optimizer state and main params."""


def steps_between(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    dtype: torch.dtype,
    steps: range,
    *,
    moving: bool,
    saved: Saved | None = None,
) -> tuple[Saved, Saved]:
    """The state saved after these steps, and the one saved after their first backward, before its step."""

    def run(rank: int, group: ProcessGroup) -> tuple[Saved, Saved]:
        module = Layers(reverse=True, dtype=dtype)
        if saved is not None:
            module.load_state_dict(saved[0])
        model, events, _ = wrap(group, module, overlap_grad_reduce=moving)
        optimizer = DistributedOptimizer(make(model), model)
        if saved is not None:
            optimizer.load_state_dict(saved[1])
            optimizer.load_main_params(saved[2])

        def save() -> Saved:
            weights = {name: value.clone() for name, value in module.state_dict().items()}
            return weights, optimizer.state_dict(), optimizer.main_params()

        at_first: Saved | None = None
        for step in steps:
            model(batch(rank, step, dtype)).backward()
            at_first = at_first or save()
            optimizer.step()
            optimizer.zero_grad()
        assert moves(events) == moving
        assert at_first is not None
        return save(), at_first

    return run_ranks(2, run)[0]


def assert_same_save(mine: Saved, theirs: Saved) -> None:
    for values, expected in ((mine[0], theirs[0]), (mine[2], theirs[2])):
        assert list(values) == list(expected)
        assert all(torch.equal(values[name], value) for name, value in expected.items())
    assert_same_state(mine[1], theirs[1])


@pytest.mark.parametrize(
    ("make", "dtype", "before", "after"), [(adamw, torch.float32, False, True), (momentum, torch.float32, True, False)]
)
def test_a_run_that_resumes_goes_on_to_the_bit(
    make: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype, before: bool, after: bool
) -> None:
    """Saved from one plan and loaded into another: the state waits for the plan of the resumed run."""
    uninterrupted, _ = steps_between(make, dtype, range(6), moving=False)
    saved, _ = steps_between(make, dtype, range(3), moving=before)
    resumed, at_first = steps_between(make, dtype, range(3, 6), moving=after, saved=saved)
    assert_same_save(at_first, saved)
    assert_same_save(resumed, uninterrupted)
