"""The ranges of a step in torch.profiler."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.events import Event, EventKind, Listener
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.optimizers import LambWithMoments
from tests.support.ranks import run_ranks


def names_of_a_step(
    rank: int,
    group: ProcessGroup,
    make: type[torch.optim.Optimizer] = torch.optim.AdamW,
    listener: Listener | None = None,
) -> list[str]:
    """Ours on rank 0, in the order in which they began; on others the numbers of the buckets."""
    module = two_layers()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100), group, listener=listener)
    optimizer = DistributedOptimizer(make(module.parameters()), model)

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


def test_gradients_on_their_way_to_owners_are_drawn_and_counted_as_waits() -> None:
    heard: list[Event] = []

    def run(rank: int, group: ProcessGroup) -> list[str]:
        return names_of_a_step(rank, group, LambWithMoments, heard.append if rank == 0 else None)

    shown, _ = run_ranks(2, run)
    step = shown.index("megastrategy::step")
    sent = [name for name in shown[step:] if "send to owners" in name]
    assert sent
    assert shown[step + 1 :][: len(sent)] == sent, "all of it at once"
    assert shown[step:].count("megastrategy::wait for gradients") == len(sent)
    kinds = [event.kind for event in heard]
    begun, ended = (len(kinds) - kinds[::-1].index(kind) for kind in (EventKind.STEP_START, EventKind.STEP_END))
    in_step = [event for event in heard[begun:ended] if event.index == 0]
    assert [event.kind for event in in_step if event.kind.name.startswith("WAIT")] == len(sent) * [
        EventKind.WAIT_START,
        EventKind.WAIT_END,
    ]


def test_nothing_is_made_where_nobody_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.profiler, "record_function", made.append)
    run_ranks(2, lambda rank, group: names_of_a_step(rank + 1, group))
    assert not made
