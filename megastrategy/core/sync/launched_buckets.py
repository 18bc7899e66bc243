"""Sends sealed buckets, one after the other, and waits for their reductions."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

from torch import Tensor

from ..buffers import GradBuffers
from ..collectives import Collectives, Handle, Handles
from ..events import EventKind, Listener, emit
from ..layout import BufferLayout, Domain
from .across import AcrossReplicas


class LaunchedBuckets:
    """The reductions of one backward that are under way.

    Args:
        collectives: all data-parallel ranks, of whose gradients the mean is taken.
        ranks_of: returns the collectives that reduce a domain's buckets.
        across: adds up over replicas, if there are several.
    """

    def __init__(
        self,
        collectives: Collectives,
        ranks_of: Callable[[Domain], Collectives],
        listener: Listener | None,
        *,
        across: AcrossReplicas | None,
    ) -> None:
        self._collectives, self._ranks_of = collectives, ranks_of
        self._listener, self._across = listener, across
        self._handles: list[Handle] = []  # by bucket, in launch order
        self._in_flight: collections.deque[Handle] = collections.deque()  # pieces, if only so many may be

    @property
    def num(self) -> int:
        """The buckets that were launched: the first of the layout, which all ranks launch in order."""
        return len(self._handles)

    def has_space_for(self, bucket: int, buffers: GradBuffers) -> bool:
        """Returns True if :meth:`launch` of this bucket does not wait for earlier ones."""
        most = buffers.max_in_flight
        return most is None or len(self._in_flight) + buffers.num_pieces(bucket) <= most

    def launch(self, bucket: int, buffers: GradBuffers) -> None:
        """Sends a sealed bucket, which follows the last that was launched."""
        self._handles.append(self._start(bucket, buffers))

    def reduce_again(self, bucket: int, buffers: GradBuffers) -> None:
        """Sends a sealed bucket, and waits for it, while nothing else is under way."""
        self._end(bucket, self._start(bucket, buffers, is_waiting=True))

    def wait(self) -> Iterator[int]:
        """Waits for all reductions in launch order, and yields each bucket when it is reduced."""
        handles, self._handles = self._handles, []  # taken first: after an error nothing waits twice
        pieces, self._in_flight = self._in_flight, collections.deque()
        for bucket, handle in enumerate(handles):
            self._end(bucket, handle)
            yield bucket
        for handle in pieces:  # of a bucket that did not get as far as having a handle
            handle.wait()

    def forget(self) -> None:
        """Drops all reductions without waiting: after an error on another rank they might never end."""
        self._handles = []
        self._in_flight.clear()

    def abort(self) -> None:
        """Ends on the device what is under way there: it may wait for a rank that is gone."""
        # NCCL's watchdog would otherwise end this process when another rank gives up and aborts.
        if self._handles or self._in_flight:
            self._collectives.abort()

    def _start(self, bucket: int, buffers: GradBuffers, *, is_waiting: bool = False) -> Handle:
        """Launches a bucket, piece by piece; if only ``max_in_flight`` pieces may be sent, waits for the oldest."""
        emit(self._listener, EventKind.REDUCE_START, bucket)
        pieces: list[Handle] = []
        for piece in range(buffers.num_pieces(bucket)):
            if len(self._in_flight) == buffers.max_in_flight:
                self._wait_for_oldest(is_waiting)
            pieces.append(self._send(*buffers.piece_to_reduce(bucket, piece), buffers.layout, bucket))
            if buffers.max_in_flight is not None:
                self._in_flight.append(pieces[-1])
        return pieces[0] if len(pieces) == 1 else Handles(pieces)

    def _wait_for_oldest(self, is_waiting: bool) -> None:
        if not is_waiting:
            emit(self._listener, EventKind.WAIT_START, 0)
        try:
            self._in_flight[0].wait()  # and removed when that has ended: no other reference to it may exist
            self._in_flight.popleft()
        finally:
            if not is_waiting:
                emit(self._listener, EventKind.WAIT_END, 0)

    def _send(self, tensor: Tensor, sums: Tensor | None, layout: BufferLayout, bucket: int) -> Handle:
        ranks = self._ranks_of(layout.buckets[bucket].domain)
        mean = 1.0 / self._collectives.size
        if sums is not None:
            return ranks.reduce_scatter_into(sums, tensor, mean)
        is_sharded = layout.num_shards > 1
        handle = (ranks.reduce_scatter if is_sharded else ranks.all_reduce)(tensor, mean)
        if self._across is None:
            return handle
        return self._across.start(tensor.chunk(ranks.size)[ranks.rank] if is_sharded else tensor, handle)

    def _end(self, bucket: int, handle: Handle) -> None:
        handle.wait()
        emit(self._listener, EventKind.REDUCE_END, bucket, handle.ran_ns)
