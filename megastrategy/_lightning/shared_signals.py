"""Shares signals between ranks over the key-value store that torch.distributed was started with.

Between two batches of evaluation ranks have no collective in common, and an additional one would cost time in every
batch. So a rank that gets a signal writes it to the store, and the others poll. They also agree there to save.
"""

from __future__ import annotations

import contextlib
import time

import torch

from .._faults.process_collectives import exception_name
from .._faults.recovery import POLL_S, first_stopped, report_stop, store_of

INTERVAL_S = 0.2
"""Seconds between two polls of a rank. A poll is one request to the store, a tenth of a millisecond."""

_POLLS_PER_S = 1280
"""The most requests of all ranks together, a tenth of a core. From 256 ranks on each polls less often."""

_PATIENCE_S = 5.0
"""The longest that a rank waits for the others, which may be within a batch, to save with it between two batches of an
evaluation. Schedulers kill a minute or so after the signal."""

_FAREWELL_S = 5.0
"""Seconds for which rank 0 waits at most for the others to stop for SIGTERM, too. Most do within a batch or a second.
A rank in an unwatched collective stops when this process ends. Schedulers kill after 30 s."""


class SharedSignals:
    """The signals that the ranks of one fit, validation or the like got. Made when it is set up.

    Attributes:
        terminates: whether some rank got SIGTERM, as far as this one knows.
    """

    def __init__(self) -> None:
        self._name = exception_name()  # that of the exception which SIGTERM becomes
        self._store = store_of(f"exception/{self._name}/signals")
        self._size = torch.distributed.get_world_size()
        self._poll_s = max(INTERVAL_S, self._size / _POLLS_PER_S)
        self._next_poll = 0.0
        self._given_up = 0
        self.terminates = False

    def share_sigterm(self) -> None:
        """Reports that this rank got SIGTERM. Called by a signal's handler."""
        self.terminates = True
        self._write("sigterm")

    def share_requeue(self, number: int, signum: int) -> None:
        """Reports that this rank got the ``number``-th signal to save and requeue. Called by a signal's handler."""
        self._next_poll = 0.0
        self._write(f"requeue/{number}", f"{signum}")

    def report_stop(self) -> None:
        """Reports that this rank stops for SIGTERM, and will not come to a collective that the others may wait in.

        The process of rank 0 most often holds the store, and waits a moment, so that the others can read it.
        """
        with contextlib.suppress(RuntimeError):
            report_stop(self._name)
            self._store.add("ended", 1)
            deadline = time.monotonic() + _FAREWELL_S
            while torch.distributed.get_rank() == 0 and self._store.add("ended", 0) < self._size:
                if time.monotonic() > deadline:
                    return
                time.sleep(POLL_S)

    def has_any_stopped(self) -> bool:
        """Whether some rank stopped for SIGTERM by itself."""
        with contextlib.suppress(RuntimeError):
            return bool(first_stopped(self._name))
        return False

    def poll(self, num_requeues_done: int) -> int:
        """Updates ``terminates``, every so often. Returns the signal for which all ranks have come, to save; 0 if there
        is none."""
        now = time.monotonic()
        if now < self._next_poll:
            return 0
        self._next_poll = now + self._poll_s
        with contextlib.suppress(RuntimeError):
            if not self._store.check(["any"]):
                return 0
            self.terminates |= self._store.check(["sigterm"])
            number = num_requeues_done + 1
            if not self.terminates and number > self._given_up and self._store.check([f"requeue/{number}"]):
                return self._await_others(number)
        return 0

    def _await_others(self, number: int) -> int:
        """Returns the signal if all ranks come between two batches, since none can save without the others; else 0.

        A rank that waits in a collective for this one cannot come: all save before the next batch of training then.
        The first rank that finds this out decides it for all, and for the rest of this evaluation.
        """
        store = self._store
        key = f"requeue/{number}"
        deadline = time.monotonic() + _PATIENCE_S
        store.add(f"{key}/came", 1)
        while store.add(f"{key}/came", 0) < self._size and not store.check([f"{key}/outcome"]):
            if time.monotonic() > deadline:
                store.compare_set(f"{key}/outcome", "", "later")
            time.sleep(POLL_S)
        if store.compare_set(f"{key}/outcome", "", "now") == b"now":
            return int(store.get(key))
        self._given_up = number
        return 0

    def _write(self, key: str, value: str = "1") -> None:
        with contextlib.suppress(RuntimeError):  # the store went with the process that held it, and its rank ended
            self._store.set(key, value)
            self._store.set("any", "1")
