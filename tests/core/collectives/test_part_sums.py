"""Sums over ranks: the same bits in pieces that stay in a core's cache and in a few kernels, which are counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megastrategy.core.collectives.part_sums import add_parts_
from tests.support.budgets import Operations, work_as_on_an_accelerator

PIECE_NUMEL = 2**16  # of the host's path: more elements than that are added in several goes
DTYPES = {
    "bf16 into fp32": (torch.bfloat16, torch.float32),
    "fp16 into fp32": (torch.float16, torch.float32),
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
    "complex64": (torch.complex64, torch.complex64),
}


def parts_and_sums(dtypes: tuple[torch.dtype, torch.dtype], num_parts: int, numel: int) -> tuple[list[Tensor], Tensor]:
    """All magnitudes of 16 bits, including the smallest: rounding twice shows in some of them."""
    generator = torch.Generator().manual_seed(3)

    def draw(dtype: torch.dtype) -> Tensor:
        exponents = torch.randint(-24, 15, (numel,), generator=generator).double()
        real = torch.randn(numel, dtype=torch.float64, generator=generator) * 2**exponents
        return (torch.complex(real, real.flip(0)) if dtype.is_complex else real).to(dtype)

    return [draw(dtypes[0]) for _ in range(num_parts)], draw(dtypes[1])


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        ("bf16 into fp32", 1.0),
        ("fp16 into fp32", 0.5),
        ("fp32", 1 / 3),
        ("fp64", 0.125),
        ("complex64", 1.0),
    ],
)
def test_an_accelerator_has_the_hosts_bits(kind: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for numel in (PIECE_NUMEL + 5, 0):
        parts, expected = parts_and_sums(DTYPES[kind], 3, numel)
        sums, copies = expected.clone(), [part.clone() for part in parts]
        add_parts_(expected, copies, scale)
        results.append((parts, sums, expected))
    work_as_on_an_accelerator(monkeypatch)
    for parts, sums, expected in results:
        add_parts_(sums, parts, scale)
        assert torch.equal(sums, expected)


@pytest.mark.parametrize(
    ("kind", "scale", "per_part", "fixed"),
    [
        ("bf16 into fp32", 1 / 8, 1, 2),
        ("bf16 into fp32", 1 / 6, 2, 3),
        ("fp32", 1 / 8, 1, 3),
        ("fp32", 1.0, 1, 2),
    ],
)
def test_kernels_grow_with_ranks_and_not_with_elements(
    kind: str, scale: float, per_part: int, fixed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_as_on_an_accelerator(monkeypatch)
    for num_parts in (2, 8):
        for numel in (100, 20 * PIECE_NUMEL):
            dtype, sum_dtype = DTYPES[kind]
            parts, sums = (
                [torch.zeros(numel, dtype=dtype) for _ in range(num_parts)],
                torch.zeros(numel, dtype=sum_dtype),
            )
            with Operations() as operations:
                add_parts_(sums, parts, scale)
            assert operations.total <= per_part * num_parts + fixed, operations.counts
