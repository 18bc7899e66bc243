"""Rounding for the wire, without ranks."""

from __future__ import annotations

import pytest
import torch

from megastrategy.core.wire import round_in_place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 8192, 8193, 100_000])
def test_tensors_are_rounded_in_their_own_memory(numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
    around = torch.randn(numel + 256, generator=torch.Generator().manual_seed(numel)).to(dtype)
    tensor, before, after = around[128 : 128 + numel], around[:128].clone(), around[128 + numel :].clone()
    expected = tensor.to(wire)
    rounded = round_in_place(tensor, wire)
    assert torch.equal(rounded, expected)
    assert numel == 0 or rounded.data_ptr() == tensor.data_ptr()
    assert torch.equal(around[:128], before)
    assert torch.equal(around[128 + numel :], after)
