"""Rounding of what is sent to fewer bits than it has; see the configuration's ``grad_wire_dtype`` and
``param_wire_dtype``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import devices

NOTHING = -0.0
"""A change that leaves every number as it is, also zero with its sign: 0.0 would make -0.0 positive."""

_PIECE_NUMEL = 2**16  # of a change on the host; what it is computed from and goes to stays in the second-level cache


def round_in_place(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds a 1-D contiguous tensor to a narrower dtype in its own memory, of which the result, a view of as many
    elements, takes the beginning. ``tensor`` has no meaning afterwards."""
    numel = tensor.numel()
    rounded = tensor.view(dtype)[:numel]
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
        change: as long, of the dtype that is sent.
    """
    for piece in _pieces(main):
        left, held, sent = main[piece], weights[piece], change[piece]
        sent.copy_(left - held)
        # Computed as every other rank does, so that all hold the same bits.
        held.add_(sent)
        left.sub_(held)
        # Of what is infinite nothing is left out; NaN would stay, whatever weights are loaded later.
        torch.nan_to_num_(left, nan=0.0, posinf=0.0, neginf=0.0)


def add_changes_(weights: Tensor, change: Tensor, own: Sequence[tuple[int, int]], *, is_even: bool) -> None:
    """Adds what others sent to the weights, which have this rank's own changes already; nothing is in ``change`` after.

    Args:
        weights, change: 1-D contiguous tensors, equally long.
        own: the parts ``[start, end)`` that this rank sent.
        is_even: whether that is one part, and all the rest came from others. Else it came with gaps, where
            ``change`` is :data:`NOTHING`.
    """
    for start, end in own:
        change[start:end].fill_(NOTHING)
    if is_even:
        [(start, end)] = own
        others = [(weights[:start], change[:start]), (weights[end:], change[end:])]
    else:
        others = [(weights, change)]
    for held, came in others:
        for piece in _pieces(held):
            held[piece].add_(came[piece])
    # The next gather may be of other parts, and what came now would be added again; equal parts come anew in whole.
    if not is_even:
        change.fill_(NOTHING)


def _pieces(tensor: Tensor) -> Iterator[slice]:
    """All of a 1-D tensor: at once on a device, and on the host, where operations of two dtypes are slow on long ones
    too, in pieces."""
    numel = tensor.numel()
    size = _PIECE_NUMEL if devices.is_on_host(tensor.device) else max(numel, 1)
    return (slice(start, start + size) for start in range(0, numel, size))
