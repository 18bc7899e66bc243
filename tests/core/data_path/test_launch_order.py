"""Which collectives the reducer launches, how often and in which order: counted."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.events import Event, EventKind
from tests.support.doubles import RecordingCollectives
from tests.support.gradients import batch
from tests.support.models import awkward_model, images, two_layers
from tests.support.ranks import run_ranks
from tests.support.training import Run


def wrap(
    group: ProcessGroup, module: torch.nn.Module, events: list[Event] | None = None, **options: object
) -> tuple[DistributedDataParallel, RecordingCollectives]:
    collectives = RecordingCollectives(group)
    config = DistributedDataParallelConfig(**options)  # type: ignore[arg-type]
    listener = events.append if events is not None else None
    return DistributedDataParallel(module, config, collectives=collectives, listener=listener), collectives


@pytest.mark.parametrize(("sharded", "overlap", "accumulate"), [(True, True, 1), (False, False, 4)])
def test_one_reduction_a_bucket_a_step(sharded: bool, overlap: bool, accumulate: int) -> None:
    """Whatever the accumulation; nothing under no_sync; the same sequence on both ranks, buckets in order."""

    def train(rank: int, group: ProcessGroup) -> list[tuple[str, int]]:
        model, collectives = wrap(
            group, awkward_model(), bucket_size=100, overlap_grad_reduce=overlap, use_distributed_optimizer=sharded
        )
        optimizer = DistributedOptimizer(Run().make_optimizer(model), model)
        model(images(rank, 0, 0), 0, rank).backward()  # in which the buckets take the order that is seen
        optimizer.step()
        numels = [bucket.numel for bucket in model.layout.buckets]
        assert len(numels) > 4
        reduction = "reduce_scatter" if sharded else "all_reduce"
        for step in range(3):
            collectives.calls.clear()
            optimizer.zero_grad()
            for microbatch in range(accumulate - 1):
                with model.no_sync():
                    model(images(rank, step, microbatch), step, rank).backward()
            assert not collectives.named("reduce_scatter", "all_reduce", "all_reduce_max"), (
                "nothing is sent under no_sync"
            )
            model(images(rank, step, 9), step, rank).backward()
            assert [call.numel for call in collectives.named(reduction)] == numels
            assert len(collectives.named("all_reduce_max")) == 1
            optimizer.step()
            # Used or not: a gradient that is in .grad on one rank must not decide what all ranks send.
            assert [call.numel for call in collectives.named("all_gather")] == (numels[::-1] if sharded else [])
        calls = [(call.name, call.numel) for call in collectives.calls]
        model.close()
        return calls

    ranks = run_ranks(2, train)
    assert ranks[0] == ranks[1]


def test_first_bucket_launches_before_last_grad() -> None:
    def train(rank: int, group: ProcessGroup) -> list[Event]:
        events: list[Event] = []
        model, _ = wrap(group, two_layers(), events, bucket_size=1)
        for _ in range(2):  # the buckets are made at the end of the first backward
            events.clear()
            model(torch.randn(4, 10)).sum().backward()
        model.close()
        return events

    for events in run_ranks(2, train):
        kinds = [(event.kind, event.index) for event in events]
        last_grad = max(i for i, (kind, _) in enumerate(kinds) if kind is EventKind.GRAD_READY)
        assert kinds.index((EventKind.REDUCE_START, 0)) < last_grad
        assert [index for kind, index in kinds if kind is EventKind.REDUCE_START] == [0, 1, 2, 3]
        assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)


class _InOrder(torch.nn.Module):
    """Three scales, used in any order; their gradients arrive in the opposite one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList([torch.ones(3) for _ in range(3)])

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.scales[number] * x)
        return x.sum()


def test_complete_bucket_waits_for_its_turn() -> None:
    def train(rank: int, group: ProcessGroup) -> list[tuple[EventKind, int]]:
        events: list[Event] = []
        model, _ = wrap(group, _InOrder(), events, bucket_size=1)
        model(torch.ones(3), (0, 1, 2)).backward()
        events.clear()
        model(torch.ones(3), (0, 2, 1)).backward()
        model.close()
        return [(e.kind, e.index) for e in events if e.kind in (EventKind.GRAD_READY, EventKind.REDUCE_START)]

    ready, start = EventKind.GRAD_READY, EventKind.REDUCE_START
    for events in run_ranks(2, train):
        assert events == [(ready, 1), (ready, 2), (start, 0), (start, 1), (ready, 0), (start, 2)]


class _EitherOrder(torch.nn.Module):
    """Two branches whose backward runs in one order on rank 0 and in the other on rank 1."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4))
        for number, branch in enumerate(self.branches):
            torch.nn.init.constant_(branch.weight, 0.1 * (number + 1))
            torch.nn.init.zeros_(branch.bias)
        self._order = list(range(4))[:: -1 if reverse else 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self._order:
            x = x + torch.tanh(self.branches[number](x))
        return x.sum()


def test_ranks_launch_in_one_order() -> None:
    def train(rank: int, group: ProcessGroup) -> tuple[list[int], list[int]]:
        events: list[Event] = []
        model, _ = wrap(group, _EitherOrder(reverse=rank == 1), events, bucket_size=1)
        model(torch.ones(2, 5)).backward()
        model.close()
        arrived = [e.index for e in events if e.kind is EventKind.GRAD_READY]
        return arrived, [e.index for e in events if e.kind is EventKind.REDUCE_START]

    (arrived_0, sent_0), (arrived_1, sent_1) = run_ranks(2, train)
    assert arrived_0 != arrived_1, "the ranks' gradients do arrive in other orders"
    assert sent_0 == sent_1 == list(range(8))


def test_forward_without_backward_sends_no_grads() -> None:
    def train(rank: int, group: ProcessGroup) -> list[str]:
        model, collectives = wrap(group, two_layers())
        model(torch.randn(4, 10))
        with torch.no_grad():
            model(torch.randn(4, 10))
        model.eval()
        with torch.inference_mode():
            model(torch.randn(4, 10))
        model.train()
        collectives.calls.clear()
        model(torch.randn(4, 10)).sum().backward()
        model.close()
        return [call.name for call in collectives.calls]

    assert run_ranks(2, train) == [["reduce_scatter", "all_reduce_max"]] * 2


# The ranges of a step in torch.profiler.


def names_of_a_step(rank: int, group: ProcessGroup) -> list[str]:
    """Ours on rank 0, in the order in which they began; on others the numbers of the buckets."""
    module = two_layers()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100), group)
    optimizer = DistributedOptimizer(torch.optim.AdamW(module.parameters()), model)

    def step() -> None:
        model(batch(rank, 0)).square().mean().backward()
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
