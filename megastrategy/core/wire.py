"""Rounding of what is sent to fewer bits than it has; see the configuration's ``grad_wire_dtype`` and
``param_wire_dtype``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import devices
from .wire_format import fill_nothing_, read_wire, wire_numel, wire_part, write_wire_

_PIECE_NUMEL = 2**16  # of a change on the host; what it is computed from and goes to stays in the second-level cache
_DEVICE_PIECE_NUMEL = 2**24  # bounds what is taken for temporaries there


def round_in_place(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds a 1-D contiguous tensor in its own memory, of which the result, a view of ``dtype``
    (:func:`.wire_format.wire_numel`), takes the beginning. ``tensor`` has no meaning afterwards; for blocks its end is
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
            ``change`` is :data:`~.wire_format.NOTHING`.
    """
    for start, end in own:
        fill_nothing_(wire_part(change, start, end))
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
        fill_nothing_(change)


def _pieces(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """All of a 1-D tensor, in parts ``[start, end)``. On the host operations of two dtypes are slow on long tensors."""
    numel = tensor.numel()
    size = _PIECE_NUMEL if devices.is_on_host(tensor.device) else _DEVICE_PIECE_NUMEL
    return ((start, min(start + size, numel)) for start in range(0, numel, size))
