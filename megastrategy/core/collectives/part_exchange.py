"""Sums in a wider dtype than what is sent, for backends that would sum in the dtype that they send.

[Note: memory for what comes]
The ranks exchange parts, and each adds up its own. What comes has as many bytes as what is sent, and all buckets of a
backward may be in flight together: with memory for each, that would be a second copy of the gradients. So there is
memory for two, in turn: while what has come for one bucket is added up, the next one's parts arrive.

On an accelerator all of this is queued on a stream of its own. That is put behind the caller's where an exchange is
started, so that nothing is sent half written; and the caller's is put behind it in ``Handle.wait`` alone, so that
neither the host nor the backward waits for the wire in between. An exchange is launched from that stream behind the
sums of the last but one, whose memory it takes: the backend orders itself behind the stream that it is launched from.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..layout import NUM_RECEIVE_BUFFERS


class PartExchange:
    """See [Note: memory for what comes].

    Args:
        device: of all tensors.
        all_to_all: launches an exchange: every rank's part for this one comes into its first argument, out of the
            others' second. Returns something with a ``wait()``, which keeps the current stream, and the host only where
            there are no streams.
        streams: ``Stream``, ``Event``, ``stream`` and ``current_stream`` of the device; None for torch's.
    """

    def __init__(self, device: torch.device, all_to_all: Callable[[Tensor, Tensor], Any], streams: Any = None) -> None:
        self._device, self._all_to_all = device, all_to_all
        self._streams: Any = streams or devices.streams_of(device)
        self._stream: Any = None if self._streams is None else self._streams.Stream(device)
        self._received: list[Tensor] = []  # 1-D bytes, the next to be used first
        self._started: collections.deque[_Exchange] = collections.deque()  # those whose sums are not begun

    def start(self, tensor: Tensor, add: Callable[[Sequence[Tensor]], object], num_parts: int) -> _Exchange:
        """Starts an exchange of the equal parts of ``tensor`` (1-D). ``add`` gets what has come, by rank, when its turn
        has come, and adds it up."""
        if self._stream is not None:
            self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._on_stream():
            while len(self._started) >= NUM_RECEIVE_BUFFERS:
                self._add_oldest()
            received = self._next_received(tensor)
            work = self._all_to_all(received, tensor)
        exchange = _Exchange(work, received.chunk(num_parts), add)
        self._started.append(exchange)
        return exchange

    def finish(self, exchange: _Exchange) -> None:
        """Makes the current stream wait for the sums of an exchange; the host where there are no streams."""
        with self._on_stream():
            while exchange in self._started:
                self._add_oldest()
            if not self._started:  # the last of a backward: whatever is queued from this stream next is behind it
                self._received.clear()
        if exchange.added is not None:
            exchange.added.wait(self._streams.current_stream(self._device))

    def close(self) -> None:
        """Gives the memory back. What was started is not waited for: after an error it might never end."""
        self._started.clear()
        self._received.clear()

    def _add_oldest(self) -> None:
        exchange = self._started[0]
        exchange.work.wait()
        with torch.no_grad():
            exchange.add(exchange.parts)
        self._started.popleft()  # not before: a wait that failed fails again, and its sums are nobody's
        exchange.work, exchange.parts = None, ()  # both keep the memory, and whoever waits for all keeps the exchange
        if self._stream is not None:
            exchange.added = self._streams.Event()
            exchange.added.record(self._stream)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else self._streams.stream(self._stream)

    def _next_received(self, tensor: Tensor) -> Tensor:
        """The memory that was used longest ago; it grows to the largest that was asked for."""
        if len(self._received) < NUM_RECEIVE_BUFFERS:
            received = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        else:
            received = self._received.pop(0)
        if received.numel() < tensor.nbytes:
            received = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        self._received.append(received)
        return received[: tensor.nbytes].view(tensor.dtype)


class _Exchange:
    """An exchange under way.

    Attributes:
        added: recorded when its sums were queued; None before, and where there are no streams.
    """

    def __init__(self, work: Any, parts: Sequence[Tensor], add: Callable[[Sequence[Tensor]], object]) -> None:
        self.work, self.parts, self.add = work, parts, add
        self.added: Any = None
