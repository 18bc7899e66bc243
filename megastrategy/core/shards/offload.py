"""Keeps tensors in pinned host memory between steps, and copies them to a device and back beside its work.

[Note: copies beside the step]
A link between host and device carries both ways at once, so each way has a stream of its own. While one slice is
stepped, the next slice's state is fetched and the last one's is sent: the device needs memory for three slices, however
much is kept. The order of streams, and the error that each rule prevents:

- A copy to the device starts after the caller's stream: its memory was another tensor's, with work on it still queued.
- The caller's stream waits for that copy before the slice is used: otherwise half of it would be the previous values.
- A copy to the host starts after the caller's stream: otherwise it would copy the values from before the step.
- A tensor that is sent to the host is referenced until the caller's stream waits for that copy: the allocator reuses
  memory without references for the next tensor of the caller's stream. The wait is queued when the next slice is sent,
  one slice late, so that nothing is held up by it.

At the end of a step the host waits for all copies. Between steps the tensors are in host memory and no copy is under
way, so that readers (a checkpoint, the user) need not know any stream. A failed step may have fetched a slice that was
not used: its memory is another tensor's by then, and the copy would overwrite that.
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
    """Copies on their way to the device, to be used after :meth:`Offload.arrive`."""

    places: list[Tensor]
    event: Any


class Offload:
    """Copies between pinned host memory and ``device``; see [Note: copies beside the step].

    ``streams``: has ``Stream``, ``Event``, ``stream`` and ``current_stream``; None for torch's of the device.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self._device = device
        self._streams: Any = streams or devices.streams_of(device)
        self._to_device: Any = self._streams and self._streams.Stream(device)
        self._to_host: Any = self._streams and self._streams.Stream(device)
        self._leaving: collections.deque[tuple[Any, Sequence[Tensor]]] = collections.deque()

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a 1-D tensor of zeros in pinned host memory."""
        return devices.pinned_memory(numel, dtype, self._device).zero_()

    def is_pinned(self, kept: Tensor) -> bool:
        """Returns True for memory like that of :meth:`zeros`. Copies from other host memory make the host wait."""
        return devices.is_pinned(kept, self._device)

    def fetch(self, kept: Sequence[Tensor]) -> Arriving:
        """Starts to copy tensors to the device."""
        # Allocated on the caller's stream, which will use the memory.
        places = [torch.empty(part.shape, dtype=part.dtype, device=self._device) for part in kept]
        return Arriving(places, self._copy(self._to_device, places, kept))

    def arrive(self, arriving: Arriving) -> list[Tensor]:
        """Returns the copies, which the current stream may use from now on."""
        self._put_behind(arriving.event)
        return arriving.places

    def send(self, kept: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Starts to copy ``values`` from the device into ``kept``. They must not be changed any more."""
        self._leaving.append((self._copy(self._to_host, kept, values), values))
        while len(self._leaving) > 1:
            self._let_go()

    def settle(self, collectives: Collectives) -> None:
        """Returns when all copies have arrived, used or not.

        Raises:
            CollectiveError: if they never will, since work queued before them waits for a rank that is gone.
        """
        if self._to_host is not None:
            self._to_host.wait_stream(self._to_device)
            # Watched: see the interface's [Note: why ranks agree over their hosts].
            with self._streams.stream(self._to_host):
                collectives.wait_for_device(self._device, "a collective before the optimizer's step")
            self._to_host.synchronize()
        self._leaving.clear()

    def _copy(self, stream: Any, places: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
        """Queues copies on one of the two streams. Returns the event of their end, None on the host."""
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
