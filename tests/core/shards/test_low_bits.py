"""The difference of bf16 weights and their fp32 main params is 17 bits, and with them nothing is lost."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from megastrategy.core import devices
from megastrategy.core.shards.low_bits import Bitmap, LowBits
from megastrategy.core.shards.param_shard import ParamShard, take_outside_changes

HALF = 2**15


def all_near(upper: int) -> Tensor:
    """Every fp32 number whose upper half is one of three that follow each other."""
    bits = torch.arange(3 * 2**16, dtype=torch.int64) + (upper << 16)
    return bits.to(torch.int32).view(torch.float32)


def kept(main: Tensor, first: int = 0) -> tuple[Tensor, LowBits]:
    weights = main.to(torch.bfloat16)
    bitmap = Bitmap(torch.zeros((first + main.numel() + 7) // 8, dtype=torch.uint8))
    bits = LowBits(torch.zeros(main.numel(), dtype=torch.int16), bitmap, first)
    bits.split_(main, weights)
    return weights, bits


@pytest.fixture(params=["host", "accelerator"])
def arrangement(request: pytest.FixtureRequest) -> object:
    """Both arrangements of the same work, with the same bits; see devices' note."""
    if request.param == "host":
        yield None
        return
    with mock.patch.object(devices, "is_on_host", return_value=False):
        yield None


@pytest.mark.usefixtures("arrangement")
@pytest.mark.parametrize("upper", [0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7D, 0x8000, 0xBF7F, 0xFF7D])
def test_every_number_comes_back_to_the_bit(upper: int) -> None:
    """Around zero, one and the largest, of both signs, even and odd."""
    main = all_near(upper)
    weights, bits = kept(main, first=5)
    assert torch.equal(bits.join(weights).view(torch.int32), main.view(torch.int32))
    back = bits.join(weights)
    take_outside_changes(back, weights, weights.dtype)
    assert torch.equal(back.view(torch.int32), main.view(torch.int32)), "the weight is the rounding of each"


def test_sixteen_bits_are_one_too_few() -> None:
    """An even weight has 65,537 main params, counted; an odd one 65,535."""
    main = torch.cat([all_near(0x3F80), all_near(0x3F83)])
    weights = main.bfloat16().view(torch.int16)
    assert int((weights == 0x3F82).sum()) == 2**16 + 1
    assert int((weights == 0x3F83).sum()) == 2**16 - 1
    _, bits = kept(main)
    halves = bits.low == -HALF
    assert bits.bitmap.read(0, main.numel()) is not None
    of_even = main[halves & (weights == 0x3F82)]
    assert sorted(of_even.view(torch.int32).tolist()) == [0x3F818000, 0x3F828000]


@pytest.mark.usefixtures("arrangement")
@pytest.mark.parametrize(("start", "end"), [(0, 8), (3, 5), (7, 9), (5, 64), (0, 100), (99, 100), (40, 40)])
def test_a_part_of_a_bitmap_leaves_the_others_alone(start: int, end: int) -> None:
    generator = torch.Generator().manual_seed(start + end)
    every = torch.randint(2, (100,), generator=generator).bool()
    bitmap = Bitmap(torch.zeros(13, dtype=torch.uint8))
    bitmap.write_(0, every.int(), 1)
    part = torch.randint(2, (end - start,), generator=generator).bool()
    bitmap.write_(start, part.int(), 1)
    every[start:end] = part
    for first, last in ((0, 100), (start, end), (start, 100)):
        read = bitmap.read(first, last)
        assert torch.equal(torch.zeros(last - first).bool() if read is None else read, every[first:last])


@pytest.mark.parametrize("written", [0.0, -0.0, 1.0, -3.0, torch.inf, -torch.inf, torch.nan, 2.0**-130, 0.12345])
def test_a_weight_that_is_written_from_outside_is_what_the_main_param_rounds_to(written: float) -> None:
    """With whatever the weight before it lacked: by no more than half a unit in the last place of the new one."""
    before, bits = kept(torch.cat([all_near(0x3F80), all_near(0xBF7F)]))
    weights = torch.full_like(before, written)
    shard = ParamShard(0, 0, weights.numel(), bits.low, weights, bits.low, bits=bits)
    main = shard.main_param()
    assert torch.equal(main.bfloat16(), weights) or bool(main.isnan().all() and weights.isnan().all())
    shard.set_main_param(torch.zeros_like(main))
    assert torch.equal(shard.main_param(), weights.float()) or bool(weights.isnan().all())
