"""Rounds numbers for the wire: to a dtype of fewer bits, or to 8 bits each with a scale for each block; see the
configuration's ``grad_wire_dtype`` and ``param_wire_dtype``.

[Note: int8 blocks]
``torch.int8`` stands for blocks: 64 numbers are 64 codes and behind them, in two bytes, their scale in bf16. A number
is its code times the scale, exactly so in fp32. Blocks follow each other, so that parts and pieces of what is sent are
parts and pieces of one 1-D tensor, as they are in 16 bits. 64 elements is what the layout aligns parameters and shards
to: a block never has numbers of two owners, or of two parameters, of which the smaller ones would become zeros.

The scale is the largest magnitude over 127. Its rounding to bf16 makes of 127 at most 127.25, so no code is out of
range. A block with NaN or infinity in it has a scale that is not finite, and is read as NaN and infinities alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import devices

NO_CHANGE = -0.0
"""A change that leaves every number as it is, also zero with its sign: 0.0 would make -0.0 positive."""

BLOCK_NUMEL = 64
BLOCK_NBYTES = BLOCK_NUMEL + torch.bfloat16.itemsize
_LARGEST_CODE = 127
_SMALLEST_SCALE = 2.0**-120  # its reciprocal is finite too; numbers that are smaller are zeros
_PIECE_NUMEL = 2**16  # of a change on the host; what it is computed from and goes to stays in the second-level cache
_DEVICE_PIECE_NUMEL = 2**24  # bounds what is taken for temporaries there


def round_in_place(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds a 1-D contiguous tensor in its own memory, of which the result, a view of ``dtype``
    (:func:`wire_numel`), takes the beginning. ``tensor`` has no meaning afterwards; for blocks its end is
    that of one."""
    numel = tensor.numel()
    rounded = tensor.view(dtype)[: wire_numel(numel, dtype)]
    if dtype == torch.int8:  # each piece is written where it or one before it was read
        for start, end in _pieces(tensor):
            write_wire_(wire_part(rounded, start, end), tensor[start:end])
        return rounded
    # An eighth by way of other memory. What is rounded takes half of the bytes or less, so from there on as many
    # elements again as there are already can be rounded without writing to where they are read: three times, whatever
    # the size.
    start = -(-numel // 8)
    rounded[:start] = tensor[:start].to(dtype)
    while start < numel:
        end = min(2 * start, numel)
        rounded[start:end].copy_(tensor[start:end])
        start = end
    return rounded


def publish_change_(main: Tensor, weights: Tensor, change: Tensor) -> None:
    """Adds to ``weights`` what of ``main - weights`` can be sent, which becomes ``change``; what is left out, that
    ``main`` has and ``weights`` do not, becomes ``main``.

    Args:
        main, weights: 1-D contiguous tensors of one dtype.
        change: as many numbers, as they are sent.
    """
    for start, end in _pieces(main):
        left, held, sent = main[start:end], weights[start:end], wire_part(change, start, end)
        write_wire_(sent, left - held)
        # Computed as every other rank does, so that all hold the same bits.
        held.add_(read_wire(sent, end - start))
        left.sub_(held)
        # Of what is infinite nothing is left out; NaN would stay, whatever weights are loaded later.
        torch.nan_to_num_(left, nan=0.0, posinf=0.0, neginf=0.0)


def add_changes_(weights: Tensor, change: Tensor, own: Sequence[tuple[int, int]], *, is_even: bool) -> None:
    """Adds what others sent to the weights, which have this rank's own changes already; nothing is in ``change`` after.

    Args:
        weights: a 1-D contiguous tensor.
        change: as many numbers, as they are sent.
        own: the parts ``[start, end)`` that this rank sent.
        is_even: whether that is one part, and all the rest came from others. Else it came with gaps, where
            ``change`` is :data:`NO_CHANGE`.
    """
    for start, end in own:
        fill_no_change_(wire_part(change, start, end))
    if is_even:
        [(start, end)] = own
        others = [(0, start), (end, weights.numel())]
    else:
        others = [(0, weights.numel())]
    for first, last in others:
        came = wire_part(change, first, last)
        for start, end in _pieces(held := weights[first:last]):
            held[start:end].add_(read_wire(wire_part(came, start, end), end - start))
    # The next gather may be of other parts, and what came now would be added again; equal parts come anew in whole.
    if not is_even:
        fill_no_change_(change)


def _pieces(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """All of a 1-D tensor, in parts ``[start, end)``. On the host operations of two dtypes are slow on long tensors."""
    numel = tensor.numel()
    size = _PIECE_NUMEL if devices.is_on_host(tensor.device) else _DEVICE_PIECE_NUMEL
    return ((start, min(start + size, numel)) for start in range(0, numel, size))


def wire_numel(numel: int, dtype: torch.dtype) -> int:
    """The elements of a tensor of ``dtype`` in which so many numbers are written; ``dtype`` may be :data:`torch.int8`
    (see [Note: int8 blocks])."""
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


def fill_no_change_(wire: Tensor) -> None:
    """Makes every number in it :data:`NO_CHANGE`."""
    if wire.dtype != torch.int8:
        wire.fill_(NO_CHANGE)
        return
    codes, scales = _codes_and_scales(wire)
    codes.zero_()
    scales.fill_(NO_CHANGE)


def _codes_and_scales(wire: Tensor) -> tuple[Tensor, Tensor]:
    blocks = wire.view(-1, BLOCK_NBYTES)
    return blocks[:, :BLOCK_NUMEL], blocks[:, BLOCK_NUMEL:].view(torch.bfloat16)
