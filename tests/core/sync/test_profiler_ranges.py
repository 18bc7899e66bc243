"""The ranges of a step in torch.profiler."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


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
