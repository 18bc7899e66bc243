"""Writes numbers for the wire: in a dtype of fewer bits, or in 8 bits each with a scale for each block.

[Note: blocks]
``torch.int8`` stands for blocks: 64 numbers are 64 codes and behind them, in two bytes, their scale in bf16. A number
is its code times the scale, exactly so in fp32. Blocks follow each other, so that parts and pieces of what is sent are
parts and pieces of one 1-D tensor, as they are in 16 bits. 64 elements is what the layout aligns parameters and shards
to: a block never has numbers of two owners, or of two parameters, of which the smaller ones would become zeros.

The scale is the largest magnitude over 127. Its rounding to bf16 makes of 127 at most 127.25, so no code is out of
range. A block with NaN or infinity in it has a scale that is not finite, and is read as NaN and infinities alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import DistributedDataParallelConfig

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
NOTHING = -0.0
"""A change that leaves every number as it is, also zero with its sign: 0.0 would make -0.0 positive."""

BLOCK_NUMEL = 64
BLOCK_NBYTES = BLOCK_NUMEL + torch.bfloat16.itemsize
_LARGEST_CODE = 127
_SMALLEST_SCALE = 2.0**-120  # its reciprocal is finite too; numbers that are smaller are zeros


def wire_dtypes(
    config: DistributedDataParallelConfig, dtype: torch.dtype, grad_dtype: torch.dtype
) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtypes that gradients, and changes of weights, are sent in: narrower ones only where that is rounding."""
    is_wide = grad_dtype.is_floating_point and grad_dtype.itemsize > 2
    sent = WIRE_DTYPES[config.grad_wire_dtype] if config.grad_wire_dtype is not None and is_wide else grad_dtype
    has_changes = config.param_wire_dtype is not None and dtype == torch.float32
    return sent, WIRE_DTYPES[config.param_wire_dtype] if has_changes else None  # type: ignore[index]


def wire_numel(numel: int, dtype: torch.dtype) -> int:
    """The elements of a tensor of ``dtype`` in which so many numbers are written; ``dtype`` may be :data:`torch.int8`
    (see [Note: blocks])."""
    return -(-numel // BLOCK_NUMEL) * BLOCK_NBYTES if dtype == torch.int8 else numel


def wire_nbytes(numel: int, dtype: torch.dtype) -> int:
    """The bytes that so many numbers take."""
    return wire_numel(numel, dtype) * dtype.itemsize


def wire_span(start: int, end: int, dtype: torch.dtype) -> tuple[int, int]:
    """The elements ``[first, last)`` of a tensor of ``dtype`` that numbers ``[start, end)`` are. Of blocks, ``start``
    begins one, and what ends inside one takes all of it."""
    return wire_numel(start, dtype), wire_numel(end, dtype)


def wire_part(wire: Tensor, start: int, end: int) -> Tensor:
    """The part in which numbers ``[start, end)`` are written: a view."""
    first, last = wire_span(start, end, wire.dtype)
    return wire[first:last]


def write_wire_(wire: Tensor, values: Tensor) -> None:
    """Rounds ``values`` (1-D) into ``wire``, which may begin where they do: all of them are read before."""
    if wire.dtype != torch.int8:
        wire.copy_(values)
        return
    if missing := -values.numel() % BLOCK_NUMEL:
        values = torch.cat([values, values.new_zeros(missing)])
    blocks, (codes, scales) = values.view(-1, BLOCK_NUMEL), _codes_and_scales(wire)
    largest = blocks.abs().amax(1, keepdim=True)
    scale = largest.mul_(1 / _LARGEST_CODE).clamp_min_(_SMALLEST_SCALE).bfloat16()
    rounded = (blocks * scale.to(values.dtype).reciprocal_()).round_()
    scales.copy_(scale)
    codes.copy_(rounded)


def read_wire(wire: Tensor, numel: int) -> Tensor:
    """The first ``numel`` numbers: ``wire`` itself where a dtype says all, else a new fp32 tensor."""
    if wire.dtype != torch.int8:
        return wire[:numel]
    codes, scales = _codes_and_scales(wire)
    return codes.float().mul_(scales.float()).view(-1)[:numel]


def fill_nothing_(wire: Tensor) -> None:
    """Makes every number in it :data:`NOTHING`."""
    if wire.dtype != torch.int8:
        wire.fill_(NOTHING)
        return
    codes, scales = _codes_and_scales(wire)
    codes.zero_()
    scales.fill_(NOTHING)


def _codes_and_scales(wire: Tensor) -> tuple[Tensor, Tensor]:
    blocks = wire.view(-1, BLOCK_NBYTES)
    return blocks[:, :BLOCK_NUMEL], blocks[:, BLOCK_NUMEL:].view(torch.bfloat16)
