"""The staging buffers through which pooled gradients are sent.

[Note: no deadlock while backward waits]
A rank that is ahead waits, inside backward, for reductions that all ranks must launch. Each launches them in the same
order and waits only for earlier ones, so ranks never wait for each other in a circle. A model whose backward has
collectives of its own (SyncBatchNorm) must not, in addition, leave different parameters unused on different ranks: the
bucket of such a parameter is launched at the end of that rank's backward, which the collective may keep it from.
"""

from __future__ import annotations

import collections

import torch
from torch import Tensor

from ..collectives import Handle
from ..events import EventKind, Listener, emit
from ..layout import NUM_STAGING_BUFFERS


class StagingPool:
    """``NUM_STAGING_BUFFERS`` buffers, used in turn, and the pieces in flight from them.

    They are freed when nothing is in flight: activations need the memory most when the next backward begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: collections.deque[Tensor] = collections.deque()  # bytes, the next to be used first
        self._in_flight: collections.deque[Handle] = collections.deque()

    @property
    def is_full(self) -> bool:
        """Whether the next piece has to wait for the oldest."""
        return len(self._in_flight) == NUM_STAGING_BUFFERS

    def has_space_for(self, num_pieces: int) -> bool:
        """Whether so many pieces have to wait for none that is in flight."""
        return len(self._in_flight) + num_pieces <= NUM_STAGING_BUFFERS

    def take(self, numel: int, dtype: torch.dtype, nbytes: list[int], listener: Listener | None) -> Tensor:
        """Returns memory for a piece, uninitialised. Waits for the oldest piece if all buffers are in flight.

        ``nbytes``: of each buffer.
        """
        if self.is_full:
            self._wait_for_oldest(listener)
        made = len(self._buffers)
        if made < len(nbytes):
            self._buffers.append(torch.empty(nbytes[made], dtype=torch.uint8, device=self._device))
        else:
            self._buffers.rotate(-1)
        return self._buffers[-1][: numel * dtype.itemsize].view(dtype)

    def _wait_for_oldest(self, listener: Listener | None) -> None:
        emit(listener, EventKind.WAIT_START, 0)
        try:
            self._in_flight[0].wait()
            self._in_flight.popleft()
        finally:
            emit(listener, EventKind.WAIT_END, 0)

    def add(self, piece: Handle) -> None:
        """Adds the piece that was sent from the last buffer."""
        self._in_flight.append(piece)

    def finish(self, pieces: list[Handle]) -> None:
        """Called when these pieces, the oldest, were waited for."""
        while self._in_flight and self._in_flight[0] in pieces:
            self._in_flight.popleft()
        if not self._in_flight:
            self._buffers.clear()
