"""A device whose streams do their work as late as they may, in host memory."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .thread_mode import ThreadMode

_QUERIES = 3
"""The number of questions until an event is over."""


class Stream:
    """Work in order, done when somebody has to see it. A ``host`` stream does it at once: what runs on the host itself
    is never late."""

    def __init__(self, lock: threading.RLock, *, host: bool = False) -> None:
        self._lock, self._host = lock, host
        self._work: list[Callable[[], object]] = []
        self._num_done = 0

    def queue(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)
            if self._host:
                self.run(len(self._work))

    @property
    def length(self) -> int:
        return len(self._work)

    def run(self, length: int) -> None:
        """Does the first ``length`` of what was queued."""
        with self._lock:
            while self._num_done < length:
                number, self._num_done = self._num_done, self._num_done + 1
                self._work[number]()
                self._work[number] = lambda: None  # and lets go of its tensors


class Event:
    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._length = self._num_queries = 0

    def record(self, stream: Stream) -> None:
        self._stream, self._length = stream, stream.length

    def wait(self, stream: Stream) -> None:
        assert self._stream is not None, "an event that was not recorded holds nobody up"
        stream.queue(functools.partial(self._stream.run, self._length))

    def query(self) -> bool:
        assert self._stream is not None
        self._num_queries += 1
        if self._num_queries < _QUERIES:
            return False
        self._stream.run(self._length)
        return True


class _Copies(ThreadMode):
    """Queues copies; every other operation that writes is an error, views are none."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            self._stream.queue(lambda: func(target, source))
            return target
        assert not func._schema.is_mutable, f"{func} on the stream"
        return func(*args, **(kwargs or {}))


class LazyDevice:
    """In the place of ``torch.cuda``: the caller's stream is ``caller``, and does its work at once unless it is
    given another."""

    Event = Event

    def __init__(self, *, lazy_caller: bool = False) -> None:
        self._lock = threading.RLock()
        self.caller = Stream(self._lock, host=not lazy_caller)

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802 - its name in torch
        return Stream(self._lock)

    def current_stream(self, device: torch.device) -> Stream:
        return self.caller

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with _Copies(stream):
            yield

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """On the caller's stream."""
        self.caller.queue(lambda: tensor.copy_(values))

    def synchronize(self) -> None:
        """Does what the caller's stream has to do."""
        self.caller.run(self.caller.length)
