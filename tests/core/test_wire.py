"""Rounding for the wire, without ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megastrategy.core.wire import fill_no_change_, publish_change_, read_wire, round_in_place, wire_numel, write_wire_


def empty_wire(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(wire_numel(numel, dtype), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("wire", "numel"),
    [
        *itertools.product([torch.bfloat16, torch.float16], [0, 1, 4095, 4096, 4097, 8192, 8193, 100_000]),
        *((torch.int8, 64 * blocks) for blocks in (0, 1, 2, 1023, 1024, 1025, 3000)),
    ],
)
def test_a_tensor_is_rounded_in_its_own_memory(numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
    around = torch.randn(numel + 256, generator=torch.Generator().manual_seed(numel)).to(dtype)
    tensor, before, after = around[128 : 128 + numel], around[:128].clone(), around[128 + numel :].clone()
    write_wire_(expected := empty_wire(numel, wire), tensor)
    rounded = round_in_place(tensor, wire)
    assert torch.equal(rounded, expected)
    assert numel == 0 or rounded.data_ptr() == tensor.data_ptr()
    assert torch.equal(around[:128], before)
    assert torch.equal(around[128 + numel :], after)


def bits(tensor: Tensor) -> Tensor:
    """Zeros of both signs are two numbers here."""
    return tensor.view(torch.int32)


@pytest.mark.parametrize(("wire", "error"), [(torch.bfloat16, 2**-8), (torch.int8, 2**-7)])
@pytest.mark.parametrize("numel", [0, 1, 63, 2**16, 2**16 + 1])
def test_rounding_errors_are_sent_with_the_next_change(numel: int, wire: torch.dtype, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights, remainder = torch.randn(numel, generator=generator), torch.zeros(numel)
    exact, other = weights.clone(), weights.clone()
    for number in range(20):
        update = torch.randn(numel, generator=generator) * 10.0 ** -(number % 6)
        main = remainder.add_(weights)
        main.add_(update)
        exact.add_(update)
        publish_change_(main, weights, change := empty_wire(numel, wire))
        other.add_(read_wire(change, numel))
        assert torch.equal(bits(other), bits(weights)), "every rank that adds the change has the same bits"
        # Not the sum of what twenty roundings left out: nothing of it was lost.
        largest = update.abs().max().item() if numel else 0.0
        torch.testing.assert_close(weights, exact, rtol=0, atol=error * largest + 1e-5)
        torch.testing.assert_close(weights + remainder, exact, rtol=0, atol=1e-5)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=64))
def test_a_saved_remainder_gives_back_the_weights_that_a_run_goes_on_with(pairs: list[tuple[float, float]]) -> None:
    """``weights + remainder`` is rounded; what that leaves, taken as a remainder again, gives the same sum."""
    main, held = (torch.tensor(values, dtype=torch.float32) for values in zip(*pairs, strict=True))
    exact = held + (main - held)
    assert torch.equal(held + (exact - held), exact)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.int8])
def test_nothing_changes_no_bit(wire: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -1e-45, float("inf")])
    fill_no_change_(nothing := empty_wire(5, wire))
    assert torch.equal(bits(values + read_wire(nothing, 5)), bits(values))
    weights = values[:4].clone()
    publish_change_(weights.clone(), weights, empty_wire(4, wire))
    assert torch.equal(weights, values[:4])


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.int8])
def test_nonfinite_numbers_leave_no_remainder(wire: torch.dtype) -> None:
    weights = torch.zeros(3)
    main = torch.tensor([float("inf"), float("nan"), 1.0])
    publish_change_(main, weights, empty_wire(3, wire))
    assert not weights[:2].isfinite().any()
    assert main.tolist() == [0.0, 0.0, 0.0]
