"""Layouts in which experts are held by a part of the data-parallel ranks: owners, and bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from megastrategy import DistributedDataParallelConfig
from megastrategy.core import memory_use
from megastrategy.core.layout import BufferLayout, Domain, ParamSpec, build_layout

DP, DENSE, EXPERTS, NUM_EXPERTS = 8, 64 * 1024, 8 * 64 * 1024, 8


def layout_of(ep: int, **options: object) -> BufferLayout:
    """A dense parameter, and a stack of experts, ``NUM_EXPERTS / ep`` on each rank; both divide evenly."""
    config = DistributedDataParallelConfig(bucket_size=10**9, **options)  # type: ignore[arg-type] # fields by name
    every = build_layout([], config, DP).domain
    groups = tuple(tuple(range(place, DP, ep)) for place in range(ep))
    experts = Domain(groups, every.num_shards // ep)
    dtypes = {"dtype": torch.bfloat16, "grad_dtype": torch.float32}
    specs = [
        ParamSpec(name="dense", shape=(DENSE,), stride=(1,), **dtypes),
        ParamSpec(name="experts", shape=(EXPERTS // ep,), stride=(1,), domain=experts, **dtypes),
    ]
    return build_layout(specs, config, DP)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_expert_bytes_fall_with_ranks(ep: int) -> None:
    """bf16 weights, fp32 gradients, Adam: the formulas of docs/experts.md, to the byte."""
    layout, edp = layout_of(ep), DP // ep
    for dp_rank in range(DP):
        use = memory_use(layout, dp_rank, 2)
        assert use.param_bytes + use.grad_bytes == 6 * (DENSE + EXPERTS // ep)
        assert use.state_bytes == 12 * (DENSE + EXPERTS) // DP
    of_dense = (4 + 2) * DENSE * (DP - 1) // DP
    sent = sum(
        buffer.shard_numel * (buffer.domain.num_shards - 1) * (buffer.grad_wire_dtype.itemsize + buffer.dtype.itemsize)
        for buffer in layout.buffers
    )
    assert sent - of_dense == (4 + 2) * (EXPERTS // ep) * (edp - 1) // edp


@pytest.mark.parametrize(("ep", "instances"), [(1, 1), (4, 1), (2, 2)])
def test_every_expert_element_has_one_owner(ep: int, instances: int) -> None:
    layout = layout_of(ep, num_distributed_optimizer_instances=instances)
    slot = layout.slots[1]
    for part in range(ep):
        group = range(part, DP, ep)
        owned = sorted(span for rank in group if (span := layout.owned_range(1, rank)) is not None)
        assert len(owned) == len(group)
        assert len(set(owned)) == len(group) // instances
        distinct = sorted(set(owned))
        assert (distinct[0][0], distinct[-1][1]) == (slot.start, slot.end)
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(distinct))
