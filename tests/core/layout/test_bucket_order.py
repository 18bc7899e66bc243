"""When another order of buckets is worth a move: arithmetic, checked by hand."""

from __future__ import annotations

import torch

from megastrategy import DistributedDataParallelConfig
from megastrategy.core.layout.arrival_order import better_layout_order, launch_cost
from megastrategy.core.layout.build import build_layout
from megastrategy.core.layout.layout import BufferLayout, ParamSpec

EACH_ITS_BUCKET = DistributedDataParallelConfig(bucket_size=1)


def layout_of(
    numels: list[int],
    config: DistributedDataParallelConfig = EACH_ITS_BUCKET,
    order: list[int] | None = None,
    dtypes: list[torch.dtype] | None = None,
) -> BufferLayout:
    """A layout of 1-D parameters "0", "1", ..., for two ranks."""
    kinds = dtypes or [torch.float32] * len(numels)
    specs = [ParamSpec(str(i), (n,), (1,), kinds[i], torch.float32) for i, n in enumerate(numels)]
    return build_layout(specs, config, 2, order)


def proposal(numels: list[int], arrived: list[int], needed: list[bool] | None = None, **of: int) -> list[int] | None:
    config = DistributedDataParallelConfig(bucket_size=of.get("bucket_size", 1))
    return better_layout_order(layout_of(numels, config), config, arrived, needed or [True] * len(numels))


def test_params_are_laid_out_in_given_order() -> None:
    layout = layout_of([128, 256, 640, 128], DistributedDataParallelConfig(bucket_size=300), order=[1, 3, 0, 2])
    assert [bucket.params for bucket in layout.buckets] == [(1, 3), (0, 2)]
    assert [(slot.bucket, slot.start) for slot in layout.slots] == [(1, 384), (0, 0), (1, 512), (0, 256)]


def test_first_complete_bucket_goes_first() -> None:
    """Whatever was registered first: the bf16 bucket of 0 and 2 waits for 0, which comes last."""
    kinds = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    config = DistributedDataParallelConfig(bucket_size=150)
    assert [b.params for b in layout_of([128] * 4, config, [2, 1, 3, 0], kinds).buckets] == [(1, 3), (2, 0)]
    assert [b.params for b in layout_of([128] * 4, config, [2, 0, 1, 3], kinds).buckets] == [(2, 0), (1, 3)]


def test_launch_cost_counts_waiting_elements() -> None:
    """Buckets of 128, 256 and 640 elements. In the order of arrival each goes with its own gradient; in the other, all
    wait for the one that comes last."""
    layout = layout_of([640, 256, 128])
    assert [bucket.numel for bucket in layout.buckets] == [128, 256, 640]
    assert launch_cost(layout, [1024, 384, 128]) == 128 * 128 + 256 * 384 + 640 * 1024
    assert launch_cost(layout, [640, 896, 1024]) == (128 + 256 + 640) * 1024


def test_late_param_goes_last_in_the_order() -> None:
    """When its bucket may go is known at the end of backward only."""
    assert proposal([1280] * 4, [3, 2, 3, 1, 0]) == [2, 1, 0, 3]


def test_order_gaining_under_a_tenth_is_not_used() -> None:
    """Two neighbours of eight, swapped: the cost is 37 where it could be 36 (in squares of 1280 elements)."""
    assert proposal([1280] * 8, [7, 6, 5, 3, 4, 2, 1, 0]) is None
