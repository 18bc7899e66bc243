"""After the step every rank holds new weights for its own shards only; this brings every rank all of them."""

from __future__ import annotations

from collections.abc import Collection

from .buffers import ParamBuffers
from .collectives import Collectives
from .events import Event, EventKind, Listener


class ParamGather:
    """All-gathers the parameter buckets, in place in ``buffers`` (which belong to the wrapped model)."""

    def __init__(self, buffers: ParamBuffers, collectives: Collectives, listener: Listener | None = None) -> None:
        self._buffers = buffers
        self._collectives = collectives
        self._listener = listener

    def gather(self, buckets: Collection[int]) -> None:
        """Gathers these buckets and returns when their parameters are whole. Collective: the same buckets on every
        rank.

        The last buckets hold the first layers, which the next forward needs first, so they go first.
        """
        buckets = sorted(buckets, reverse=True)
        handles = []
        for bucket in buckets:
            self._emit(EventKind.GATHER_START, bucket)
            handles.append(self._collectives.all_gather(self._buffers.bucket(bucket)))
        self._emit(EventKind.WAIT_START, 1)
        try:
            for bucket, handle in zip(buckets, handles, strict=True):
                handle.wait()
                self._emit(EventKind.GATHER_END, bucket)
        finally:
            self._emit(EventKind.WAIT_END, 1)

    def _emit(self, kind: EventKind, index: int) -> None:
        if self._listener is not None:
            self._listener(Event(kind, index))
