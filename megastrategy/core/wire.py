"""Rounds numbers for the wire: to a dtype of fewer bits, or to 8 bits each with a scale for each block; see the
configuration's ``grad_wire_dtype`` and ``param_wire_dtype``.

[Note: int8 blocks]
``torch.int8`` means blocks: 64 numbers are 64 codes, followed by their scale, in two bytes of bf16. A number is its
code times the scale, exact in fp32. Blocks are adjacent, so that parts of what is sent are parts of one 1-D tensor, as
in 16 bits. 64 elements is the layout's alignment of parameters and shards: a block never contains numbers of two
owners, or of two parameters, where the smaller ones would become zeros.

The scale is the largest magnitude over 127. Its rounding to bf16 turns 127 into at most 127.25, so no code is out of
range. A block that contains NaN or infinity has a scale that is not finite, and is read as only NaN and infinities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import devices

NO_CHANGE = -0.0
"""A change that leaves every number as it is, including the sign of zero: 0.0 would make -0.0 positive."""

BLOCK_NUMEL = 64
BLOCK_NBYTES = BLOCK_NUMEL + torch.bfloat16.itemsize
_LARGEST_CODE = 127
_SMALLEST_SCALE = 2.0**-120  # its reciprocal is finite, too; smaller numbers become zeros
_SLICE_NUMEL = 2**16  # of a change on the host; operands and result stay in the second-level cache
_DEVICE_SLICE_NUMEL = 2**24  # limits temporaries on a device


def round_in_place(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds a 1-D contiguous tensor in its own memory, and returns the result, a view of ``dtype``
    (:func:`wire_numel`) at its beginning. ``tensor`` is invalid afterwards. With blocks its end must be that of one."""
    numel = tensor.numel()
    rounded = tensor.view(dtype)[: wire_numel(numel, dtype)]
    if dtype == torch.int8:  # each slice is written where it or an earlier one was read
        for start, end in _slices(tensor):
            write_wire_(wire_part(rounded, start, end), tensor[start:end])
        return rounded
    # An eighth is rounded in other memory. The result takes half of the bytes or less, so from then on as many elements
    # as are done already can be rounded without overwriting their source: three times, whatever the size.
    start = -(-numel // 8)
    rounded[:start] = tensor[:start].to(dtype)
    while start < numel:
        end = min(2 * start, numel)
        rounded[start:end].copy_(tensor[start:end])
        start = end
    return rounded


def publish_change_(main: Tensor, weights: Tensor, change: Tensor) -> None:
    """Adds the part of ``main - weights`` that can be sent to ``weights``; it becomes ``change``,
    and the rest ``main``.

    Args:
        main, weights: 1-D contiguous tensors of one dtype.
        change: as many numbers, as they are sent.
    """
    for start, end in _slices(main):
        rest, values, sent = main[start:end], weights[start:end], wire_part(change, start, end)
        write_wire_(sent, rest - values)
        # Computed as on every other rank, so that all have the same bits.
        values.add_(read_wire(sent, end - start))
        rest.sub_(values)
        # An infinite number has no rest; NaN would stay, whatever weights are loaded later.
        torch.nan_to_num_(rest, nan=0.0, posinf=0.0, neginf=0.0)


def add_changes_(weights: Tensor, change: Tensor, own: Sequence[tuple[int, int]], *, is_even: bool) -> None:
    """Adds the changes of other ranks to the weights, which already include this rank's own, and
    clears them in ``change``.

    Args:
        weights: a 1-D contiguous tensor.
        change: as many numbers, as they are sent.
        own: the parts ``[start, end)`` that this rank sent.
        is_even: whether that is one part, and the rest came from others. Otherwise there are gaps,
            where ``change`` is :data:`NO_CHANGE`.
    """
    for start, end in own:
        fill_no_change_(wire_part(change, start, end))
    if is_even:
        [(start, end)] = own
        others = [(0, start), (end, weights.numel())]
    else:
        others = [(0, weights.numel())]
    for first, last in others:
        received = wire_part(change, first, last)
        for start, end in _slices(values := weights[first:last]):
            values[start:end].add_(read_wire(wire_part(received, start, end), end - start))
    # The next gather may have other parts, and these would be added again; equal parts are always replaced as a whole.
    if not is_even:
        fill_no_change_(change)


def _slices(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yields parts ``[start, end)`` of a 1-D tensor. Operations of two dtypes are slow on long tensors on the host."""
    numel = tensor.numel()
    size = _SLICE_NUMEL if devices.is_on_host(tensor.device) else _DEVICE_SLICE_NUMEL
    return ((start, min(start + size, numel)) for start in range(0, numel, size))


def wire_numel(numel: int, dtype: torch.dtype) -> int:
    """Returns the elements of a tensor of ``dtype`` that represent so many numbers; see [Note: int8 blocks]."""
    return -(-numel // BLOCK_NUMEL) * BLOCK_NBYTES if dtype == torch.int8 else numel


def wire_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Returns the bytes that represent so many numbers."""
    return wire_numel(numel, dtype) * dtype.itemsize


def wire_span(start: int, end: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the elements ``[first, last)`` of a tensor of ``dtype`` that represent numbers ``[start, end)``. In
    blocks ``start`` begins one, and the last block is complete."""
    return wire_numel(start, dtype), wire_numel(end, dtype)


def wire_part(wire: Tensor, start: int, end: int) -> Tensor:
    """Returns a view of the part that represents numbers ``[start, end)``."""
    first, last = wire_span(start, end, wire.dtype)
    return wire[first:last]


def write_wire_(wire: Tensor, values: Tensor) -> None:
    """Rounds ``values`` (1-D) into ``wire``, which may begin at their address: all of them are read before."""
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
    """Returns the first ``numel`` numbers: a view of ``wire``, or for blocks a new fp32 tensor."""
    if wire.dtype != torch.int8:
        return wire[:numel]
    codes, scales = _codes_and_scales(wire)
    return codes.float().mul_(scales.float()).view(-1)[:numel]


def fill_no_change_(wire: Tensor) -> None:
    """Sets every number in it to :data:`NO_CHANGE`."""
    if wire.dtype != torch.int8:
        wire.fill_(NO_CHANGE)
        return
    codes, scales = _codes_and_scales(wire)
    codes.zero_()
    scales.fill_(NO_CHANGE)


def _codes_and_scales(wire: Tensor) -> tuple[Tensor, Tensor]:
    blocks = wire.view(-1, BLOCK_NBYTES)
    return blocks[:, :BLOCK_NUMEL], blocks[:, BLOCK_NUMEL:].view(torch.bfloat16)
