"""Checks that every rank has reached the same call, for calls that users forget to make on all ranks.

Saving is such a call: ``if rank == 0: torch.save(optimizer.state_dict())`` is right with an unsharded optimizer. So
before the first collective of the call, ranks check in the key-value store of their group that all have come. An error
names a missing rank, and says where a rank is that waits elsewhere.

What holds, and no thread is needed for:

1. A check ends with one outcome for all ranks: the first that is written. Nothing was sent before it.
2. A check that succeeds has been called, under one name and at one place of the program, by all ranks.
3. A check that cannot succeed fails within seconds if the rank that will not come waits in one of these collectives, in
   another check, or in a barrier of a door, or if its process has ended. Otherwise it fails with the patience of rank 0
   (:data:`MISSING_RANK_TIMEOUT`).
4. No time is evidence: a rank that is only slow is waited for.
5. Ranks that catch the error may go on, and call again.

[Note: which calls of the ranks belong together]
A check is named after the call and the number of collectives that its rank has started, which is the same
on all ranks at the same place of a program. Several of one name are counted. The first outcome that is written
decides the check for all ranks: ``complete``, or the reason why it failed. A rank that comes to a check that has
failed takes the next number.

[Note: evidence that a rank will not come]
A rank that waits in a collective beyond the place of a check has passed it. It looks once a second, while it waits,
whether rank 0 is in such a check (rank 0: whether another is), and ends that check. A rank in a check writes where it
is, so that rank 0 sees one that is in a different call at the same place. A rank that enters a barrier of a door writes
how many it has entered, since such a barrier does not look.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from ..errors import NotOnAllRanksError

MISSING_RANK_TIMEOUT = timedelta(seconds=60)
"""The time that rank 0 waits for the others, which have no reason to be late. They wait for it as long as for a
collective, since it may be evaluating."""

CALL_ON_EVERY_RANK = (
    "Call it on every rank, and save what it returns on rank 0:\n"
    "    state = optimizer.state_dict()\n"
    "    if rank == 0:\n"
    "        torch.save(state, path)"
)

_POLL_S = 0.01
_LOOK_S = 0.5  # between two searches for evidence: a probe is a message that no rank receives, and gloo keeps each
_ROOT = "megastrategy/rank_check"
_COMPLETE = "complete"


class Progress:
    """Counts the collectives that this rank has started.

    Attributes:
        num_started: their number.
        last_started: the kind of the last one; "" before the first.
    """

    def __init__(self) -> None:
        self.num_started = 0
        self.last_started = ""


class _Place(NamedTuple):
    """The place of a rank that is in a check.

    Attributes:
        key: of the check.
        num_started: the collectives that the rank had started.
        call: the check's name in messages.
    """

    rank: int
    key: str
    num_started: int
    call: str


class RankCheck:
    """The checks of one rank, in the store of its group; every rank has one such object.

    Attributes:
        progress: counts collectives; the owner does so.
        num_optimizers: the sharded optimizers so far, which are numbered in the names of checks.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Only rank 0 waits for a short time: the others may rightly come early, while it evaluates.
        self.patience = min(MISSING_RANK_TIMEOUT, timeout) if rank == 0 else timeout
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.progress = Progress()
        self.num_optimizers = 0
        self._place = -1  # of the last check, in the count of collectives
        self._counts: dict[str, int] = {}  # of checks at that place, by name
        self._num_barriers = 0
        # Rank 0 waits for all others, which wait for rank 0: one place for it, and one for the last of them.
        self._own_place = f"{_ROOT}/place of rank 0" if rank == 0 else f"{_ROOT}/place of another"
        self._other_place = f"{_ROOT}/place of another" if rank == 0 else f"{_ROOT}/place of rank 0"

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
        # A failed check is skipped by its number, so that ranks that caught the error can call again.
        while not outcome:
            outcome = self._outcome(_Place(self.rank, self._next_key(what), self._place, what), deadline, probe)
        if outcome != _COMPLETE:
            raise NotOnAllRanksError(
                f"rank {self.rank}: {what} is spread over the ranks and has to be called on all of them, after the "
                f"same number of batches, but {outcome}. {remedy}"
            )

    def report_waiting(self, what: str, collective: int) -> None:
        """Ends a check that this rank has passed. Called now and then while it waits in its ``collective``-th
        collective (from 1)."""
        place = self._read_other_place()
        # The check is before the collective in which this rank waits, so neither can reach the other.
        if place is not None and place.num_started < collective:
            self.store.compare_set(f"{place.key}/outcome", "", f"rank {self.rank} is elsewhere, waiting in {what}")

    def enter_barrier(self, barrier: str) -> None:
        """Reports a barrier of a door: all ranks enter it, and no rank looks there for checks that it has passed."""
        self._num_barriers += 1
        if self.rank != 0:
            self.store.set(_barrier_key(self.rank), f"{self._num_barriers} {barrier}")

    # --- one check ---------------------------------------------------------------------------------------------------

    def _next_key(self, what: str) -> str:
        """Returns the check's key; see [Note: which calls of the ranks belong together]."""
        if self._place != self.progress.num_started:
            self._place = self.progress.num_started
            self._counts.clear()
        name = f"{self._place}/{what}"
        self._counts[name] = self._counts.get(name, -1) + 1
        return f"{_ROOT}/{name}/{self._counts[name]}"

    def _outcome(self, place: _Place, deadline: float, probe: Callable[[int], object]) -> str:
        """Takes part in a check and returns its outcome; "" if it had failed before this rank came."""
        store = self.store
        outcome = f"{place.key}/outcome"
        if store.check([outcome]):
            # A late rank joins a check that succeeded, and starts a new one after a failure.
            known = store.get(outcome).decode()
            return known if known == _COMPLETE else ""
        # Marked before any wait: rank 0 counts these marks.
        store.set(f"{place.key}/{self.rank}", place.call)
        # The first outcome written is valid for all ranks: two that time out at once must not report different ones.
        return store.compare_set(outcome, "", self._wait_for_others(place, deadline, probe)).decode()

    def _wait_for_others(self, place: _Place, deadline: float, probe: Callable[[int], object]) -> str:
        """Returns the outcome that another rank has written, or the one that this rank proposes."""
        store = self.store
        outcome = f"{place.key}/outcome"
        next_look = time.monotonic() + _LOOK_S  # mostly all come at once
        while missing := self._missing(place.key):
            # Rank 0 has written it, or a rank that has passed this check.
            if store.check([outcome]):
                return store.get(outcome).decode()
            now = time.monotonic()
            if now > deadline:
                return f"rank(s) {missing} did not call it within {self.patience.total_seconds():g} s"
            if now > next_look:
                next_look = now + _LOOK_S
                # Again each time: another rank in another check may have written its place over this one.
                store.set(self._own_place, pickle.dumps(place))  # type: ignore[arg-type] # takes bytes
                if reason := self._why_in_vain(place, missing, probe):
                    return reason
            time.sleep(_POLL_S)
        return _COMPLETE

    def _missing(self, key: str) -> list[int]:
        """Returns the ranks that rank 0 still waits for; other ranks wait for the outcome that rank 0 writes."""
        return [rank for rank in range(self.size) if not self.store.check([f"{key}/{rank}"])] if self.rank == 0 else [0]

    def _why_in_vain(self, place: _Place, missing: list[int], probe: Callable[[int], object]) -> str:
        """Returns the evidence that a missing rank will not come, of what does not show by itself; "" if none."""
        ended = [rank for rank in missing if _has_ended(rank, probe)]
        if ended:
            return f"rank(s) {ended} have ended: if with an error, look at that one first"
        if self.rank != 0:
            return ""  # rank 0 decides between two calls, and the other may then come to this rank's
        other = self._read_other_place()
        is_elsewhere = other is not None and other.rank in missing and other.num_started >= place.num_started
        if other is not None and is_elsewhere and not self.store.check([f"{other.key}/outcome"]):
            return f"rank {other.rank} is elsewhere, in {other.call}"
        for rank in missing:
            if self.store.check([_barrier_key(rank)]):
                number, _, barrier = self.store.get(_barrier_key(rank)).decode().partition(" ")
                if int(number) > self._num_barriers:
                    return f"rank {rank} is elsewhere, in {barrier}"
        return ""

    def _read_other_place(self) -> _Place | None:
        """Returns the last check of rank 0, or for rank 0 the last of another rank."""
        if not self.store.check([self._other_place]):
            return None
        place: _Place = pickle.loads(self.store.get(self._other_place))
        return place


def _barrier_key(rank: int) -> str:
    return f"{_ROOT}/barriers/{rank}"


def _has_ended(rank: int, probe: Callable[[int], object]) -> bool:
    try:
        probe(rank)
    except RuntimeError:
        return True
    return False
