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

_ATEN = torch.ops.aten
_MAKES_NO_ELEMENTS = {
    _ATEN.detach.default,
    _ATEN.view.default,
    _ATEN.view.dtype,
    _ATEN.alias.default,
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.split.Tensor,
    _ATEN.empty.memory_format,
}
_running = threading.local()
_QUERIES = 3
"""The number of questions until an event is over."""


class Stream:
    """Work in order, done when a reader has to see it. One that is ``early`` does it at once, like work on the host."""

    def __init__(self, lock: threading.RLock, *, early: bool = False) -> None:
        self._lock, self.is_early = lock, early
        self._work: list[Callable[[], object]] = []
        self._num_done = 0

    def queue(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)
            if self.is_early:
                self.run(len(self._work))

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        event.wait(self)

    def synchronize(self) -> None:
        self.run(self.length)

    @property
    def is_running(self) -> bool:
        """Whether this thread is doing what was queued on some stream."""
        return getattr(_running, "now", False)

    @property
    def length(self) -> int:
        return len(self._work)

    def run(self, length: int) -> None:
        """Does the first ``length`` of what was queued."""
        with self._lock:
            while self._num_done < length:
                number, self._num_done = self._num_done, self._num_done + 1
                was_running, _running.now = self.is_running, True
                self._work[number]()
                _running.now = was_running
                self._work[number] = lambda: None  # and lets go of its tensors


class Event:
    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._length = self._num_queries = 0

    def record(self, stream: Stream) -> None:
        self._stream, self._length = stream, stream.length

    def wait(self, stream: Stream) -> None:
        assert self._stream is not None, "an event that was not recorded does not wait"
        stream.queue(functools.partial(self._stream.run, self._length))

    def query(self) -> bool:
        assert self._stream is not None
        self._num_queries += 1
        if self._num_queries < _QUERIES:
            return False
        self._stream.run(self._length)
        return True

    def synchronize(self) -> None:
        assert self._stream is not None
        self._stream.run(self._length)


class _Queued(ThreadMode):
    """Queues what reads or writes elements. What it makes is poison until the stream comes to it; views and memory are
    made at once."""

    def __init__(self, stream: Stream, memory_of: Callable[[Any], Any]) -> None:
        super().__init__()
        self._stream, self._memory_of = stream, memory_of

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKES_NO_ELEMENTS or self._stream.is_running:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            given = [self._memory_of(arg) for arg in args]
            self._stream.queue(lambda: func(*given, **kwargs))
            return args[0]
        made = torch.full_like(func(*args, **kwargs), torch.nan)
        self._stream.queue(lambda: made.copy_(func(*args, **kwargs)))
        return made


class LazyDevice:
    """In place of ``torch.cuda``: the caller's stream is ``caller``, and does its work at once unless it is
    given another. With ``early`` all other streams do theirs as early as they may. ``memory_of`` gives what work that
    is queued holds in an argument's place, where that is not the tensor itself, as it is not on a device."""

    Event = Event

    def __init__(
        self,
        *,
        lazy_caller: bool = False,
        early: bool = False,
        memory_of: Callable[[Any], Any] = lambda argument: argument,
    ) -> None:
        self._lock, self._early, self._memory_of = threading.RLock(), early, memory_of
        self._local = threading.local()
        self.caller = Stream(self._lock, early=not lazy_caller)

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802 - its name in torch
        return Stream(self._lock, early=self._early)

    def current_stream(self, device: torch.device | None) -> Stream:
        stream: Stream = getattr(self._local, "stream", self.caller)
        return stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(None), stream
        try:
            with _Queued(stream, self._memory_of):
                yield
        finally:
            self._local.stream = before

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """On the caller's stream."""
        self.caller.queue(lambda: tensor.copy_(values))

    def synchronize(self) -> None:
        """Does what the caller's stream has to do."""
        self.caller.run(self.caller.length)
