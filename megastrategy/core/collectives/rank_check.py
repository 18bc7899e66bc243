"""Checks that every rank has reached the same call, for calls that users forget to make on all ranks.

Saving is such a call: ``if rank == 0: torch.save(optimizer.state_dict())`` is right with an unsharded optimizer. So
before the first collective of the call, ranks check in the key-value store of their group that all have come. An error
names a missing rank, and says where a rank is that waits elsewhere.

[Note: which calls of the ranks belong together]
A check is named after the call and the number of the group's collectives that its rank has started, which is the same
on all ranks at the same place of a program. Several of one name are counted. The first outcome that is written
decides the check for all ranks: ``complete``, or the reason why it failed. A rank that comes to a check that has
failed takes the next number.

[Note: evidence that a rank will not come]
A rank that has started more collectives than rank 0, or entered more of a door's barriers, has passed the place where
rank 0 is, and will never come there. Its responder says so at once. Without such evidence a rank may be late, and is
waited for. No time is involved, so a slow rank is not mistaken for one that is elsewhere.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import NotOnAllRanksError

MISSING_RANK_TIMEOUT = timedelta(seconds=60)
"""The time that rank 0 waits for the others, which have no reason to be late. They wait for it as long as for a
collective, since it may be evaluating."""

ASK_AFTER_S = 1.0
"""The time that rank 0 waits before it asks the others where they are: mostly they come by themselves."""

CALL_ON_EVERY_RANK = (
    "Call it on every rank, and save what it returns on rank 0:\n"
    "    state = optimizer.state_dict()\n"
    "    if rank == 0:\n"
    "        torch.save(state, path)"
)

_FOREVER = timedelta(days=30)  # a store's wait needs a timeout
_POLL_S = 0.01  # in a main thread that waits
_RESPONDER_POLL_S = 0.05  # beside a training that continues
_PROBE_S = 0.5  # a probe is a message that no rank receives, and gloo keeps each
_ROOT = "megastrategy/rank_check"
_COMPLETE = "complete"
_ENDED = "rank(s) {} have ended: if with an error, look at that one first"


class Progress:
    """Counts how far this rank's main thread has come, for its responder to read.

    Attributes:
        num_started: the number of collectives of the group that it has started.
        last_started: the kinds of the last of them, the newest last.
        num_barriers: the number of a door's barriers, and similar calls, that it has entered.
        barrier: the last of them.
        call: the check that it is in; "" if in none.
    """

    def __init__(self) -> None:
        self.num_started = self.num_barriers = 0
        self.last_started: collections.deque[str] = collections.deque(maxlen=64)
        self.barrier = self.call = ""

    def enter_barrier(self, barrier: str) -> None:
        """Counts a barrier of a door that all ranks enter."""
        self.barrier = barrier
        self.num_barriers += 1

    def counts(self) -> dict[str, Any]:
        """Returns the counts that :meth:`place_if_past` compares."""
        return {"num_started": self.num_started, "num_barriers": self.num_barriers, "call": self.call}

    def place_if_past(self, other: dict[str, Any]) -> str:
        """Returns where this rank is, if certainly past the other's place, otherwise ""; see [Note: evidence that a
        rank will not come]."""
        # Strictly more: an equal count is the same place, and a smaller one a rank that has still to come.
        if self.num_started > other["num_started"]:
            return f"in the {self.last_started[-1]} of a later step"
        if self.num_barriers > other["num_barriers"]:
            return f"in {self.barrier}"
        call = self.call
        # Different calls at one place of the program: neither rank will come to the other's.
        return f"in {call}" if call not in ("", other["call"]) else ""


class Responder:
    """A daemon thread that reports to rank 0 where this rank's main thread is. It sleeps in the store's ``wait``, on
    its own connection, and costs nothing until rank 0 asks."""

    _FILE_POLL_S = 0.2
    _CLOSE_TIMEOUT_S = 5.0

    def __init__(self, store: Store, rank: int, progress: Progress, number: int) -> None:
        self._store = store
        self._rank = rank
        self._own_store: Store  # the thread makes it
        self._progress = progress
        self.number = number  # of rank 0's next request
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="megastrategy-responder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; may be called again."""
        self._stops = True  # before the number is read: the thread reads it after changing the number
        with contextlib.suppress(RuntimeError):  # a store that has ended has also ended the thread's wait
            key = self._key()
            # Compared, since rank 0 may have sent a request: it is answered first, and _stops then ends the loop.
            self._store.compare_set(key, "", "stop")
            self._thread.join(self._CLOSE_TIMEOUT_S)
            if self._store.check([key]) and self._store.get(key) == b"stop":
                self._store.delete_key(key)  # rank 0's next request will have that number

    def _key(self) -> str:
        return f"{_ROOT}/ask/{self._rank}/{self.number}"

    def _run(self) -> None:
        try:
            # A waiting thread needs its own connection. It is made here: torch tries to connect to a store whose
            # process has just ended until the store's timeout, half an hour, and the main thread has to notice
            # that in a collective.
            self._own_store = self._store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
            while not self._stops:
                self._wait()
                request = self._own_store.get(self._key())
                if request == b"stop":
                    return
                self.number += 1
                self._answer(pickle.loads(request))
        except RuntimeError:  # the store has ended with its process, and rank 0 cannot ask any more
            return

    def _wait(self) -> None:
        """Returns when rank 0 asks. A store in a file is polled, less often than the hundred times a second
        of its own wait."""
        store = self._own_store
        # Only the innermost store knows whether its wait sleeps or polls.
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        while type(store).__name__ == "FileStore" and not self._own_store.check([self._key()]):
            time.sleep(self._FILE_POLL_S)
        self._own_store.wait([self._key()], _FOREVER)

    def _answer(self, request: dict[str, Any]) -> None:
        """Waits until the check is over, this rank has come, or it is certain that it will not come."""
        key = request["key"]
        store = self._own_store
        # This rank's mark, or the outcome: either answers the request.
        while not self._stops and not any(store.check([f"{key}/{end}"]) for end in (self._rank, "outcome")):
            if where := self._progress.place_if_past(request):
                # Compared, so that an existing outcome stays: ranks that have read it have begun their call.
                store.compare_set(f"{key}/outcome", "", f"rank {self._rank} is elsewhere, {where}")
                return
            time.sleep(_RESPONDER_POLL_S)


class RankCheck:
    """The checks of one rank, in the store of its group; every rank has one such object.

    Attributes:
        progress: see :class:`Progress`; the owner counts collectives in it.
        num_optimizers: the number of calls of :meth:`start_responder`.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Only rank 0 waits for a short time: the others may rightly come early, while it evaluates.
        self.patience = min(MISSING_RANK_TIMEOUT, timeout) if rank == 0 else timeout
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.progress = Progress()
        self._place = -1  # of the last check, in the count of collectives
        self._counts: dict[str, int] = {}  # of checks at that place, by name
        self._num_asked = [0] * size
        self.num_optimizers = 0
        self._responder: Responder | None = None
        self._num_answered = 0

    def start_responder(self) -> None:
        """Starts a thread that reports to rank 0 where this rank's main thread is; see :class:`Responder`."""
        self.num_optimizers += 1
        self.restart_responder()

    def restart_responder(self) -> None:
        """Starts the responder again if it was stopped."""
        # Rank 0 asks, and is never asked.
        if self._responder is None and self.num_optimizers and self.rank != 0:
            self._responder = Responder(self.store, self.rank, self.progress, self._num_answered)
            self._finalizer = weakref.finalize(self, Responder.stop, self._responder)

    def stop_responder(self) -> None:
        """Ends the responder's thread. May be called again."""
        if self._responder is not None:
            # Otherwise the finalizer would keep the responder, and stop it again.
            self._finalizer.detach()
            self._responder.stop()
            # The next responder continues the count: rank 0 numbers its requests without regard to stops.
            self._num_answered = self._responder.number
            self._responder = None

    def wait_for_all(self, what: str, probe: Callable[[int], object], remedy: str = CALL_ON_EVERY_RANK) -> None:
        """Returns when all ranks have called this with the same ``what``, the call's name in messages.

        Args:
            probe: called now and then with a missing rank; raises a RuntimeError if that rank has ended.
            remedy: the last sentence of the message.

        Raises:
            NotOnAllRanksError: if another rank is elsewhere, calls something else, has ended, or does not come in time.
                Nothing was sent, and the ranks may continue together.
        """
        deadline = time.monotonic() + self.patience.total_seconds()
        outcome = ""
        self.progress.call = what
        try:
            # A failed check is skipped by its number, so that ranks that caught the error can call again.
            while not outcome:
                outcome = self._outcome(self._next_key(what), what, deadline, probe)
        finally:
            # Also after an error: a responder that still reported "in state_dict()" would fail other checks.
            self.progress.call = ""
        if outcome != _COMPLETE:
            raise NotOnAllRanksError(
                f"rank {self.rank}: {what} is spread over the ranks and has to be called on all of them, but "
                f"{outcome}. {remedy}"
            )

    def _ask(self, rank: int, request: dict[str, Any]) -> None:
        """Asks another rank's responder, from rank 0, where that rank is."""
        # Numbered, never overwritten: the next responder finds a request that came while there was none.
        number = self._num_asked[rank]
        self._num_asked[rank] += 1
        self.store.set(f"{_ROOT}/ask/{rank}/{number}", pickle.dumps(request))  # type: ignore[arg-type] # takes bytes

    def report_waiting(self, where: str, collective: int) -> None:
        """Ends the check of a rank that has not started rank 0's ``collective``-th collective (from 1), in which rank 0
        waits. Called by rank 0 now and then while it waits."""
        if self.rank != 0 or not self.store.check([f"{_ROOT}/caller"]):
            return
        key, num_started = pickle.loads(self.store.get(f"{_ROOT}/caller"))
        # Its check is before the collective in which this rank waits, so neither can reach the other.
        if num_started < collective:
            self.store.compare_set(f"{key}/outcome", "", f"rank 0 is elsewhere, {where}")

    # --- one check ---------------------------------------------------------------------------------------------------

    def _next_key(self, what: str) -> str:
        """Returns the check's key; see [Note: which calls of the ranks belong together]."""
        if self._place != self.progress.num_started:
            self._place = self.progress.num_started
            self._counts.clear()
        name = f"{self._place}/{what}"
        self._counts[name] = self._counts.get(name, -1) + 1
        return f"{_ROOT}/{name}/{self._counts[name]}"

    def _outcome(self, key: str, what: str, deadline: float, probe: Callable[[int], object]) -> str:
        """Takes part in a check and returns its outcome; "" if it had failed before this rank came."""
        store = self.store
        outcome = f"{key}/outcome"
        if store.check([outcome]):
            # A late rank joins a check that succeeded, and starts a new one after a failure.
            known = store.get(outcome).decode()
            return known if known == _COMPLETE else ""
        # Marked before any wait: rank 0 counts these marks.
        store.set(f"{key}/{self.rank}", what)
        if self.rank != 0:
            store.set(f"{_ROOT}/caller", pickle.dumps((key, self.progress.num_started)))  # type: ignore[arg-type]
        # The first outcome written is valid for all ranks: two that time out at once must not report different ones.
        return store.compare_set(outcome, "", self._wait_for_others(key, deadline, probe)).decode()

    def _wait_for_others(self, key: str, deadline: float, probe: Callable[[int], object]) -> str:
        """Returns the outcome that another rank has written, or the one that this rank proposes."""
        store = self.store
        outcome = f"{key}/outcome"
        ask_at = time.monotonic() + ASK_AFTER_S
        next_probe = time.monotonic() + _PROBE_S
        has_asked = self.rank != 0  # only rank 0 asks
        while missing := self._missing(key):
            # Rank 0 has written it, or a rank's responder, which has found evidence that this rank will never come.
            if store.check([outcome]):
                return store.get(outcome).decode()
            now = time.monotonic()
            if now >= ask_at and not has_asked:
                # Once: a responder watches by itself until the check has an outcome.
                has_asked = True
                for rank in missing:
                    self._ask(rank, {"key": key, **self.progress.counts()})
            if now > deadline:
                return f"rank(s) {missing} did not call it within {self.patience.total_seconds():g} s"
            # Not in each iteration: a probe sends a message.
            if now > next_probe:
                next_probe += _PROBE_S
                if ended := [rank for rank in missing if _has_ended(rank, probe)]:
                    return _ENDED.format(ended)
            time.sleep(_POLL_S)
        return _COMPLETE

    def _missing(self, key: str) -> list[int]:
        """Returns the ranks that rank 0 still waits for; other ranks wait for the outcome that rank 0 writes."""
        return [rank for rank in range(self.size) if not self.store.check([f"{key}/{rank}"])] if self.rank == 0 else [0]


def _has_ended(rank: int, probe: Callable[[int], object]) -> bool:
    try:
        probe(rank)
    except RuntimeError:
        return True
    return False
