"""Holds back Ctrl-C while ranks save together, until all of them can act on it.

A rank that left a save between two collectives would leave the others waiting in the second one, and a callback that
saves on exceptions would wait for them. So a signal is delivered only where its exception reaches all ranks: before a
tensor is written, before the directory gets its name, and after the save.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class HeldSignals:
    """Context manager that holds back SIGINT and SIGTERM where Python functions handle them; a second one acts at once.

    Does nothing outside the main thread, where Python delivers no signals.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.deliver()

    def deliver(self) -> None:
        """Calls the handler of a signal that was held back; that of Ctrl-C raises KeyboardInterrupt."""
        if self._held is not None:
            number, frame = self._held
            self._held = None
            self._handlers[number](number, frame)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is not None:
            self._held = None
            self._handlers[number](number, frame)
        else:
            self._held = number, frame
