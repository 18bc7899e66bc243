"""Finds out whether all ranks are here before a call that users forget to make on all of them.

Saving is the place: ``if rank == 0: torch.save(optimizer.state_dict())`` is right with a whole optimizer. So ranks meet
in the key-value store of their group first. A missing rank is named there, and a rank that waits elsewhere says so.

[Note: the same meeting]
A meeting is named after the call and after the number of the group's collectives that its rank has started, which is
the same on all ranks at the same place of a program. Several under one name are counted. The first outcome that is
written decides the meeting for all: ``complete``, or the reason why it failed. A rank that comes to a meeting that has
failed takes the next number.

[Note: evidence]
A rank that has started more collectives than rank 0, or entered more of a door's barriers, has passed the place where
rank 0 is, and will never come there. Its attendant says so at once. Without such evidence a rank may be late,
and is waited for. No time is involved, so that a slow rank is not taken for one that is elsewhere.
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
"""The time that rank 0 waits before it asks the others where they are: most often they are about to come."""

CALL_ON_EVERY_RANK = (
    "Call it on every rank, and save what it returns on rank 0:\n"
    "    state = optimizer.state_dict()\n"
    "    if rank == 0:\n"
    "        torch.save(state, path)"
)

_FOREVER = timedelta(days=30)  # a store's wait has to be given some end
_POLL_S = 0.01  # between two looks of a main thread that waits
_LOOK_S = 0.05  # of an attendant, which looks beside a training that goes on
_PROBE_S = 0.5  # a probe is a message that nobody receives, and gloo keeps each
_ROOT = "megastrategy/rank_check"
_COMPLETE = "complete"
_ENDED = "rank(s) {} have ended: if with an error, look at that one first"


class Progress:
    """Counts how far this rank's main thread has come, for its attendant to read.

    Attributes:
        num_started: how many collectives of the group it has started.
        last_started: the kinds of the last of them, the newest last.
        num_barriers: how many barriers of a door, and the like, it has entered.
        barrier: the last of them.
        calls: the meeting that it is in; empty if in none.
    """

    def __init__(self) -> None:
        self.num_started = self.num_barriers = 0
        self.last_started: collections.deque[str] = collections.deque(maxlen=64)
        self.barrier = self.calls = ""

    def start(self, what: str) -> None:
        """A collective is started."""
        self.num_started += 1
        self.last_started.append(what)

    def enter_barrier(self, barrier: str) -> None:
        """A barrier of a door's is entered, which all ranks enter."""
        self.barrier = barrier
        self.num_barriers += 1

    def counts(self) -> dict[str, Any]:
        """The counts that :meth:`place_if_past` compares."""
        return {"num_started": self.num_started, "num_barriers": self.num_barriers, "calls": self.calls}

    def place_if_past(self, other: dict[str, Any]) -> str:
        """Says where this rank is, if certainly past the place of the other; else empty. See [Note: evidence]."""
        # Strictly more: an equal count is the very place, and a smaller one a rank that is still to come.
        if self.num_started > other["num_started"]:
            return f"in the {self.last_started[-1]} of a later step"
        if self.num_barriers > other["num_barriers"]:
            return f"in {self.barrier}"
        calls = self.calls
        # Two meetings at one place of the program: neither rank will come to the other's.
        return f"in {calls}" if calls not in ("", other["calls"]) else ""


class Responder:
    """A thread that answers rank 0 for a rank whose main thread is elsewhere.

    It sleeps in the store's own ``wait``, on a connection of its own, and costs nothing until rank 0 asks. A daemon.
    """

    _FILE_POLL_S = 0.2
    _CLOSE_TIMEOUT_S = 5.0

    def __init__(self, store: Store, rank: int, progress: Progress, number: int) -> None:
        self._store, self._rank = store, rank
        self._own_store: Store  # the thread makes it
        self._progress = progress
        self.number = number  # of the next request
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="megastrategy-attendant", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; may be called again."""
        self._stops = True  # before the number is read: the thread looks after it has changed the number
        with contextlib.suppress(RuntimeError):  # a store that ended has ended the thread's wait, too
            key = self._key()
            # Compared, since rank 0 may have put a request there: it is answered first, and the loop ends by _stops.
            self._store.compare_set(key, "", "stop")
            self._thread.join(self._CLOSE_TIMEOUT_S)
            if self._store.check([key]) and self._store.get(key) == b"stop":
                self._store.delete_key(key)  # rank 0's next request will have that number

    def _key(self) -> str:
        return f"{_ROOT}/ask/{self._rank}/{self.number}"

    def _run(self) -> None:
        try:
            # What waits keeps a connection. It is made here: to a store whose process has just ended torch tries to
            # connect until the store's timeout, half an hour, and the main thread is to find that out by a collective.
            self._own_store = self._store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
            while not self._stops:
                self._wait()
                request = self._own_store.get(self._key())
                if request == b"stop":
                    return
                self.number += 1
                self._look_out(pickle.loads(request))
        except RuntimeError:  # the store ended with the process that held it, and nobody will ask any more
            return

    def _wait(self) -> None:
        """Returns when rank 0 asks. A store in a file would look for it a hundred times a second."""
        store = self._own_store
        # Only the store at the bottom knows whether its wait sleeps or polls.
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        while type(store).__name__ == "FileStore" and not self._own_store.check([self._key()]):
            time.sleep(self._FILE_POLL_S)
        self._own_store.wait([self._key()], _FOREVER)

    def _look_out(self, request: dict[str, Any]) -> None:
        """Watches until the meeting is over, or this rank's main thread is there."""
        key, store = request["key"], self._own_store
        # This rank's own mark, or the outcome: either ends the question.
        while not self._stops and not any(store.check([f"{key}/{end}"]) for end in (self._rank, "outcome")):
            if where := self._progress.place_if_past(request):
                # Never over an outcome that stands: ranks that have read it are inside already.
                store.compare_set(f"{key}/outcome", "", f"rank {self._rank} is elsewhere, {where}")
                return
            time.sleep(_LOOK_S)


class RankCheck:
    """The roll calls of one rank; all ranks of a group have one each.

    Args:
        store: of the group, seen by all its ranks.
        timeout: of the group's collectives.

    Attributes:
        progress: see :class:`Progress`; the owner counts collectives in it.
        num_optimizers: how often :meth:`start_responder` was called.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Only rank 0 is impatient: the others may rightly come early, while it evaluates.
        self.patience = min(MISSING_RANK_TIMEOUT, timeout) if rank == 0 else timeout
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.progress = Progress()
        self._place = -1  # of the last meeting, in the count of collectives
        self._counts: dict[str, int] = {}  # of meetings at that place, by name
        self._num_asked = [0] * size
        self.num_optimizers = 0
        self._responder: Responder | None = None
        self._num_answered = 0

    def start_responder(self) -> None:
        """Has a thread say where this rank is, for rank 0, whatever its main thread does; see :class:`Responder`."""
        self.num_optimizers += 1
        self.restart_responder()

    def restart_responder(self) -> None:
        """The attendant comes back if it was dismissed."""
        # Rank 0 asks and is never asked.
        if self._responder is None and self.num_optimizers and self.rank != 0:
            self._responder = Responder(self.store, self.rank, self.progress, self._num_answered)
            self._finalizer = weakref.finalize(self, Responder.stop, self._responder)

    def stop_responder(self) -> None:
        """Ends the attendant's thread. May be called again."""
        if self._responder is not None:
            # Else the finalizer would keep the attendant, and stop a thread that has stopped.
            self._finalizer.detach()
            self._responder.stop()
            # The count goes on with the next attendant: rank 0 numbers its requests through, dismissed or not.
            self._num_answered, self._responder = self._responder.number, None

    def wait_for_all(self, what: str, probe: Callable[[int], object], remedy: str = CALL_ON_EVERY_RANK) -> None:
        """Returns when all ranks have called this with the same ``what``.

        Args:
            what: the call, for the message.
            probe: called now and then with a missing rank; raises a RuntimeError if that rank has ended.
            remedy: the last sentence of the message.

        Raises:
            NotOnAllRanksError: if another rank is elsewhere, calls something else, has ended, or does not come in time.
                Nothing was sent, and the ranks may go on together.
        """
        deadline = time.monotonic() + self.patience.total_seconds()
        outcome = ""
        self.progress.calls = what
        try:
            # A failed meeting is skipped by its number, so that ranks that caught the error can meet again.
            while not outcome:
                outcome = self._outcome(self._next_key(what), what, deadline, probe)
        finally:
            # Also after an error: an attendant that went on saying "in state_dict()" would fail other meetings.
            self.progress.calls = ""
        if outcome != _COMPLETE:
            raise NotOnAllRanksError(
                f"rank {self.rank}: {what} is spread over the ranks and has to be called on all of them, but "
                f"{outcome}. {remedy}"
            )

    def _ask(self, rank: int, request: dict[str, Any]) -> None:
        """Rank 0 asks another rank's attendant where that rank is."""
        # Numbered, never overwritten: a request that came while there was no attendant is found by the next one.
        number, self._num_asked[rank] = self._num_asked[rank], self._num_asked[rank] + 1
        self.store.set(f"{_ROOT}/ask/{rank}/{number}", pickle.dumps(request))  # type: ignore[arg-type] # takes bytes

    def report_waiting(self, where: str, collective: int) -> None:
        """Tells a rank that calls, and has not started rank 0's ``collective``-th collective (from 1), that it waits in
        vain. Called by rank 0 now and then while it waits in that one."""
        if self.rank != 0 or not self.store.check([f"{_ROOT}/caller"]):
            return
        key, num_started = pickle.loads(self.store.get(f"{_ROOT}/caller"))
        # It calls from before the collective in which this rank waits, so neither can reach the other.
        if num_started < collective:
            self.store.compare_set(f"{key}/outcome", "", f"rank 0 is elsewhere, {where}")

    # --- one meeting -------------------------------------------------------------------------------------------------

    def _next_key(self, what: str) -> str:
        """See [Note: the same meeting]."""
        if self._place != self.progress.num_started:
            self._place = self.progress.num_started
            self._counts.clear()
        name = f"{self._place}/{what}"
        self._counts[name] = self._counts.get(name, -1) + 1
        return f"{_ROOT}/{name}/{self._counts[name]}"

    def _outcome(self, key: str, what: str, deadline: float, probe: Callable[[int], object]) -> str:
        """Takes part in a meeting and returns its outcome; empty if it had failed before this rank came."""
        store, outcome = self.store, f"{key}/outcome"
        if store.check([outcome]):
            # A rank that comes late joins what succeeded, and starts anew after what failed.
            known = store.get(outcome).decode()
            return known if known == _COMPLETE else ""
        # Marked before anything is waited for: rank 0 counts these marks.
        store.set(f"{key}/{self.rank}", what)
        if self.rank == 0:
            found = self._wait_for_other_ranks(key, deadline, probe)
        else:
            store.set(f"{_ROOT}/caller", pickle.dumps((key, self.progress.num_started)))  # type: ignore[arg-type]
            found = self._wait_for_rank_zero(outcome, probe, deadline)
        # The first outcome written holds for all ranks: two that time out at once must not report different ones.
        return found if not found else store.compare_set(outcome, "", found).decode()

    def _wait_for_other_ranks(self, key: str, deadline: float, probe: Callable[[int], object]) -> str:
        """Waits for all ranks, on rank 0, and returns the outcome that it proposes."""
        store = self.store
        ask_at, next_probe = time.monotonic() + ASK_AFTER_S, time.monotonic() + _PROBE_S
        has_asked = False
        while missing := [rank for rank in range(self.size) if not store.check([f"{key}/{rank}"])]:
            if store.check([f"{key}/outcome"]):
                # A rank's attendant has found evidence that it will never come.
                return store.get(f"{key}/outcome").decode()
            now = time.monotonic()
            if now >= ask_at and not has_asked:
                # Once: an attendant watches by itself until the meeting has its outcome.
                has_asked = True
                for rank in missing:
                    self._ask(rank, {"key": key, **self.progress.counts()})
            if now > deadline:
                return f"rank(s) {missing} did not call it within {self.patience.total_seconds():g} s"
            if now > next_probe:
                next_probe += _PROBE_S
                if ended := [rank for rank in missing if _has_ended(rank, probe)]:
                    return _ENDED.format(ended)
            time.sleep(_POLL_S)
        return _COMPLETE

    def _wait_for_rank_zero(self, outcome: str, probe: Callable[[int], object], deadline: float) -> str:
        """Returns the outcome that rank 0 writes, or what is wrong."""
        store, next_probe = self.store, time.monotonic() + _PROBE_S
        while not store.check([outcome]):
            now = time.monotonic()
            if now > deadline:
                return f"rank(s) [0] did not call it within {self.patience.total_seconds():g} s"
            # Not at each look: a probe sends.
            if now > next_probe:
                next_probe += _PROBE_S
                if _has_ended(0, probe):
                    return _ENDED.format([0])
            time.sleep(_POLL_S)
        return store.get(outcome).decode()


def _has_ended(rank: int, probe: Callable[[int], object]) -> bool:
    try:
        probe(rank)
    except RuntimeError:
        return True
    return False
