"""Posts signals in the key-value store that torch.distributed was started with, where the other ranks find them.

Between two batches of evaluation ranks have no collective in common, and one of their own would cost some of every
batch. So a rank that gets a signal posts it, and the others look every so often. Their meeting then begins in the
store, too.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import torch

from .._faults.process_collectives import exception_name, is_awaited
from .._faults.recovery import POLL_S, say_left, store_of, who_left

LOOK_S = 0.2
"""Seconds between two looks of a rank. A look is one request of the store, of a tenth of a millisecond."""

_LOOKS_PER_S = 1280
"""The most that all ranks together ask the store, a tenth of a core. From 256 ranks on each looks less often."""

_PATIENCE = timedelta(seconds=20)
"""The longest that a rank waits for the others to save with it between two batches of an evaluation. A batch of theirs
may be under way."""

_FAREWELL_S = 5.0
"""Seconds that rank 0 waits at most for the others to stop for SIGTERM, too. Most come within a batch or a second. One
that is in a collective which nobody watches comes when this process ends. Schedulers kill after 30 s."""


class PostedSignals:
    """The signals of one fit, validation or the like, as all its ranks know them. Made when it is set up.

    Attributes:
        terminates: whether some rank got SIGTERM, as far as this one knows.
    """

    def __init__(self) -> None:
        self._name = exception_name()  # that of the exception which SIGTERM becomes
        self._store = store_of(f"exception/{self._name}/signals")
        self._size = torch.distributed.get_world_size()
        self._look_s = max(LOOK_S, self._size / _LOOKS_PER_S)
        self._next_look = 0.0
        self._given_up = 0
        self.terminates = False

    def post_sigterm(self) -> None:
        """Posts that this rank got SIGTERM. Called by a signal's handler."""
        self.terminates = True
        self._post("sigterm")

    def post_requeue(self, number: int, signum: int) -> None:
        """Posts that this rank got the ``number``-th signal to save and requeue. Called by a signal's handler."""
        self._next_look = 0.0
        self._post(f"requeue/{number}", f"{signum}")

    def leave(self) -> None:
        """Says that this rank stops for SIGTERM, and will not come to what the others may wait for.

        The process of rank 0 most often holds the store, and stays a moment, so that the others learn of it.
        """
        with contextlib.suppress(RuntimeError):
            say_left(self._name)
            self._store.add("ended", 1)
            deadline = time.monotonic() + _FAREWELL_S
            while torch.distributed.get_rank() == 0 and self._store.add("ended", 0) < self._size:
                if time.monotonic() > deadline:
                    return
                time.sleep(POLL_S)

    def has_left(self) -> bool:
        """Whether some rank stopped for SIGTERM by itself."""
        with contextlib.suppress(RuntimeError):
            return bool(who_left(self._name))
        return False

    def look(self, num_requeues_done: int) -> int:
        """Brings ``terminates`` up to date, every so often. Returns the signal for which all ranks are here now, and
        save; 0 if there is none."""
        now = time.monotonic()
        if now < self._next_look:
            return 0
        self._next_look = now + self._look_s
        with contextlib.suppress(RuntimeError):
            if not self._store.check(["any"]):
                return 0
            self.terminates |= self._store.check(["sigterm"])
            number = num_requeues_done + 1
            if not self.terminates and number > self._given_up and self._store.check([f"requeue/{number}"]):
                return self._await_others(number)
        return 0

    def _await_others(self, number: int) -> int:
        """Returns the signal if all ranks come between two batches, for none can save alone; else 0.

        A rank that waits in a collective for this one cannot come: all save before the next batch of training then.
        Whoever finds that out first decides it for all, and for the rest of this evaluation.
        """
        store, key = self._store, f"requeue/{number}"
        deadline = time.monotonic() + _PATIENCE.total_seconds()
        store.add(f"{key}/came", 1)
        while store.add(f"{key}/came", 0) < self._size and not store.check([f"{key}/outcome"]):
            if time.monotonic() > deadline or is_awaited():
                store.compare_set(f"{key}/outcome", "", "later")
            time.sleep(POLL_S)
        if store.compare_set(f"{key}/outcome", "", "now") == b"now":
            return int(store.get(key))
        self._given_up = number
        return 0

    def _post(self, what: str, value: str = "1") -> None:
        with contextlib.suppress(RuntimeError):  # the store went with the process that held it, and its rank ended
            self._store.set(what, value)
            self._store.set("any", "1")
