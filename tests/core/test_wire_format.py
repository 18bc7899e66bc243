"""Blocks of 8-bit numbers with a scale each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megastrategy.core.layout.layout import PARAM_ALIGNMENT_NUMEL, SHARD_ALIGNMENT_NUMEL
from megastrategy.core.wire import (
    BLOCK_NBYTES,
    BLOCK_NUMEL,
    fill_no_change_,
    read_wire,
    wire_nbytes,
    wire_numel,
    wire_part,
    write_wire_,
)


def blocks_of(values: Tensor) -> Tensor:
    blocks = torch.empty(wire_numel(values.numel(), torch.int8), dtype=torch.int8)
    write_wire_(blocks, values)
    return blocks


def test_parameters_and_shards_begin_with_a_block() -> None:
    assert PARAM_ALIGNMENT_NUMEL % BLOCK_NUMEL == SHARD_ALIGNMENT_NUMEL % BLOCK_NUMEL == 0


def test_a_number_takes_a_byte_and_a_block_two_more() -> None:
    assert wire_nbytes(0, torch.int8) == 0
    assert wire_nbytes(1, torch.int8) == wire_nbytes(64, torch.int8) == 66
    assert wire_nbytes(65, torch.int8) == 132
    assert wire_nbytes(65, torch.bfloat16) == 130


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=500, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=200), st.sampled_from([torch.float32, torch.float64]))
def test_a_number_is_off_by_half_a_scale_at_most(numbers: list[float], dtype: torch.dtype) -> None:
    values = torch.tensor(numbers, dtype=dtype)
    blocks = blocks_of(values)
    for start in range(0, len(numbers), BLOCK_NUMEL):
        block = values[start : start + BLOCK_NUMEL]
        codes = wire_part(blocks, start, start + block.numel())[:BLOCK_NUMEL]
        assert codes.min() >= -127, "a code that were out of range would come out with another sign"
        came = read_wire(wire_part(blocks, start, start + block.numel()), block.numel())
        # A scale has eight bits, and is not smaller than 2**-120.
        scale = max(float(block.abs().max()) / 127 * (1 + 2**-8), 2.0**-120)
        assert (came.double() - block.double()).abs().max() <= scale / 2 * (1 + 2**-6)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_nonfinite_numbers_affect_only_their_block(bad: float) -> None:
    values = torch.ones(3 * BLOCK_NUMEL)
    values[70] = bad
    came = read_wire(blocks_of(values), values.numel()).view(3, -1).isfinite()
    assert came.all(1).tolist() == [True, False, True]
    assert not came[1].any()


def test_zeros_are_zeros_and_nothing_is_minus_zero() -> None:
    zeros = torch.zeros(100)
    assert torch.equal(read_wire(blocks_of(zeros), 100).view(torch.int32), zeros.view(torch.int32))
    fill_no_change_(blocks := torch.empty(2 * BLOCK_NBYTES, dtype=torch.int8))
    assert torch.equal(read_wire(blocks, 100).view(torch.int32), (-zeros).view(torch.int32))


def test_a_small_parameter_beside_a_large_one_keeps_its_bits() -> None:
    """Each begins with a block, so neither has the other's scale."""
    large, small = torch.full((BLOCK_NUMEL,), 1e6), torch.full((BLOCK_NUMEL,), 1e-6)
    came = read_wire(blocks_of(torch.cat([large, small])), 2 * BLOCK_NUMEL)
    torch.testing.assert_close(came[BLOCK_NUMEL:], small, rtol=2**-8, atol=0.0)
