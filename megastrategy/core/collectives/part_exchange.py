"""Sums in a wider dtype than gradients are sent in, for backends that would sum in the dtype that they send.

[Note: receive buffers]
The ranks exchange parts, and each adds up its own. A rank receives as many bytes as it sends, and all buckets of a
backward may be in flight together: memory for each of them would be a second copy of the gradients. So there is memory
for two, in turn: while one bucket's parts are added up, the next one's arrive.

On an accelerator all of this is queued on a separate stream. It waits for the caller's stream where an exchange is
started, so that no incomplete gradient is sent; the caller's stream waits for it only in ``Handle.wait``, so that
neither the host nor the backward waits for the wire in between. An exchange is launched on that stream behind the sums
of the last but one, whose memory it uses: the backend waits for the stream on which it is launched.
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
    """Exchanges parts and adds them up; see [Note: receive buffers].

    Args:
        device: of all tensors.
        all_to_all: launches an exchange, which receives every rank's part for this one into its first argument, out of
            the others' second. Returns an object with a ``wait()``, which blocks the current stream, and the host only
            if there are no streams.
        streams: ``Stream``, ``Event``, ``stream`` and ``current_stream`` of the device; None for torch's.
    """

    def __init__(self, device: torch.device, all_to_all: Callable[[Tensor, Tensor], Any], streams: Any = None) -> None:
        self._device = device
        self._all_to_all = all_to_all
        self._streams: Any = streams or devices.streams_of(device)
        self._stream: Any = None if self._streams is None else self._streams.Stream(device)
        self._received: list[Tensor] = []  # 1-D bytes, the next to be used first
        self._started: collections.deque[_Exchange] = collections.deque()  # not added up yet

    def start(self, tensor: Tensor, add: Callable[[Sequence[Tensor]], object], num_parts: int) -> _Exchange:
        """Starts an exchange of the equal parts of ``tensor`` (1-D). ``add`` is called with the received parts, by
        rank, in its turn, and adds them up."""
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
        """Makes the current stream wait for the sums of an exchange, or the host if there are no streams."""
        with self._on_stream():
            while exchange in self._started:
                self._add_oldest()
            if not self._started:  # the last of a backward; later work waits for this stream
                self._received.clear()
        if exchange.added is not None:
            exchange.added.wait(self._streams.current_stream(self._device))

    def close(self) -> None:
        """Frees the memory. Does not wait for started exchanges, which may never end after an error."""
        self._started.clear()
        self._received.clear()

    def _add_oldest(self) -> None:
        exchange = self._started[0]
        exchange.work.wait()
        with torch.no_grad():
            exchange.add(exchange.parts)
        self._started.popleft()  # not before: a wait that failed has to fail again, since nothing was added
        # frees the memory, since the caller may keep the exchange
        exchange.work = None
        exchange.parts = ()
        if self._stream is not None:
            exchange.added = self._streams.Event()
            exchange.added.record(self._stream)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else self._streams.stream(self._stream)

    def _next_received(self, tensor: Tensor) -> Tensor:
        """Returns the memory that was used longest ago; it grows to the largest size requested."""
        if len(self._received) < NUM_RECEIVE_BUFFERS:
            received = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        else:
            received = self._received.pop(0)
        if received.numel() < tensor.nbytes:
            received = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        self._received.append(received)
        return received[: tensor.nbytes].view(tensor.dtype)


class _Exchange:
    """An exchange in flight; ``added`` is recorded when its sums were queued (None before, and without streams)."""

    def __init__(self, work: Any, parts: Sequence[Tensor], add: Callable[[Sequence[Tensor]], object]) -> None:
        self.work = work
        self.parts = parts
        self.add = add
        self.added: Any = None
