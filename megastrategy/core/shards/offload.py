"""Keeps tensors in pinned memory of the host between steps, and copies them to a device and back beside its work.

[Note: copies beside the step]
A link between host and device carries both ways at once, so each way has a stream of its own. While one piece is
stepped the next comes and the last one goes: memory for three is all that the device needs, however much is kept. What
orders them, and what would happen else:

- A copy to the device starts behind the caller's stream: its memory was another tensor's, with work on it still queued.
- The caller's stream is put behind that copy before the piece is used: it would be half of it the last one's.
- A copy to the host starts behind the caller's stream: it would take what was there before the step.
- What goes to the host is held until the caller's stream has been put behind that copy: the allocator gives free memory
  to the next tensor of the caller's stream. That is done when the next piece goes, one piece late, so
  that nothing stands still for it.

At the end of a step the host waits for all copies. Between steps what is kept is in host memory and at rest, so that
a reader (a checkpoint, the user) need not know of any stream. A step that failed may have copied a piece
that was not used: its memory is another tensor's by then, and the copy would be written over that.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import devices
from ..collectives import Collectives


class Arriving(NamedTuple):
    """Copies on the device, to be used after :meth:`Offload.arrive`."""

    places: list[Tensor]
    event: Any


class Offload:
    """See [Note: copies beside the step].

    Args:
        device: that computes.
        streams: ``Stream``, ``Event``, ``stream`` and ``current_stream`` of it; None for torch's.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self._device = device
        self._streams: Any = streams or devices.streams_of(device)
        self._to_device: Any = self._streams and self._streams.Stream(device)
        self._to_host: Any = self._streams and self._streams.Stream(device)
        self._leaving: collections.deque[tuple[Any, Sequence[Tensor]]] = collections.deque()

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, in pinned memory of the host."""
        return devices.pinned_memory(numel, dtype, self._device).zero_()

    def is_pinned(self, kept: Tensor) -> bool:
        """Whether it is where :meth:`zeros` are. Copies are made from other memory of the host as well, and are waited
        for."""
        return devices.is_pinned(kept, self._device)

    def fetch(self, kept: Sequence[Tensor]) -> Arriving:
        """Starts to copy what is kept to the device."""
        # On the caller's stream, to which the allocator counts it.
        places = [torch.empty(part.shape, dtype=part.dtype, device=self._device) for part in kept]
        return Arriving(places, self._copy(self._to_device, places, kept))

    def arrive(self, arriving: Arriving) -> list[Tensor]:
        """The copies, which the current stream may use from now on."""
        self._put_behind(arriving.event)
        return arriving.places

    def send(self, kept: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Starts to copy ``values`` of the device to where they are kept. They may not be changed any more."""
        self._leaving.append((self._copy(self._to_host, kept, values), values))
        while len(self._leaving) > 1:
            self._let_go()

    def settle(self, collectives: Collectives) -> None:
        """Returns when what is kept is what was sent last, and no copy is on its way, used or not.

        Raises:
            CollectiveError: if that will not be: what the copies are queued behind waits for a rank that is gone.
        """
        if self._to_host is not None:
            self._to_host.wait_stream(self._to_device)
            # Watched: see the interface's [Note: why ranks agree over their hosts].
            with self._streams.stream(self._to_host):
                collectives.wait_for_device(self._device, "a collective before the optimizer's step")
            self._to_host.synchronize()
        self._leaving.clear()

    def _copy(self, stream: Any, places: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
        """Queues copies on one of the two streams; returns the event of their end, None on the host."""
        if stream is None:
            for place, value in zip(places, values, strict=True):
                place.copy_(value)
            return None
        stream.wait_stream(self._streams.current_stream(self._device))
        event = self._streams.Event()
        with self._streams.stream(stream):
            for place, value in zip(places, values, strict=True):
                place.copy_(value, non_blocking=True)
            event.record(stream)
        return event

    def _let_go(self) -> None:
        event, _ = self._leaving.popleft()
        self._put_behind(event)

    def _put_behind(self, event: Any) -> None:
        if event is not None:
            event.wait(self._streams.current_stream(self._device))
