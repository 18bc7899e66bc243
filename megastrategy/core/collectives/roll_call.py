"""Finding out who is here before something that users forget to do on all ranks.

Saving is the place: ``if rank == 0: torch.save(optimizer.state_dict())`` is right with a whole optimizer. So ranks meet
in the key-value store of their group first. There a rank that is missed can be named, one that waits elsewhere can say
so, and where rank 0 alone is enough it learns that it is alone.

[Note: the same meeting]
A meeting is named after what is called and after how many of the group's collectives its rank has started, which is
the same number on all ranks at the same place of a program. Several under one name are counted. The first that writes
a meeting's outcome decides it for all: ``complete`` (all came), ``alone`` (rank 0 goes on by itself, which it alone may
say), or why it failed. A rank that comes when a meeting has failed already takes the next number.

[Note: evidence]
A rank that has started more collectives than rank 0, or entered more of a door's barriers, has passed the place where
rank 0 is, and will never come there. Its attendant says so within moments. Without such evidence a rank may be late,
and is waited for. No time is involved, so that a slow rank is not taken for one that is elsewhere.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import NotOnAllRanksError

PATIENCE = timedelta(seconds=60)
"""The time that rank 0 waits for the others, which have no reason to be late. They wait for it as long as for a
collective, since it may be evaluating or saving something alone."""

GRACE_S = 1.0
"""The time that rank 0 waits before it goes on alone, where it may. Ranks that come together send as much at a time as
their network takes, so it is worth a moment; what is saved is the same."""

LINGER_S = 5.0
"""The time that a process which has done its work stays for rank 0, which may be about to save."""

CALL_ON_EVERY_RANK = (
    "Call it on every rank, and save what it returns on rank 0:\n"
    "    state = optimizer.state_dict()\n"
    "    if rank == 0:\n"
    "        torch.save(state, path)"
)

_FOREVER = timedelta(days=30)  # a store's wait has to be given some end
_POLL_S = 0.01  # between two looks of a main thread that waits
_LOOK_S = 0.05  # of an attendant, which looks beside a training that goes on
_ANSWER_S = 5.0
"""The time that an attendant may take, beyond its patience, to say that it ended."""
_PROBE_S = 0.5  # a probe is a message that nobody receives, and gloo keeps each
_ROOT = "megastrategy/roll"
_COMPLETE, _ALONE = "complete", "alone"


class Handler(Protocol):
    """Does what rank 0 asks of this rank."""

    def __call__(self, request: dict[str, Any], store: Store) -> None: ...


H = TypeVar("H", bound=Handler)


class Meeting(NamedTuple):
    """A meeting that this rank has entered."""

    is_complete: bool
    """Whether all ranks are in it; else rank 0 alone is, or was."""
    key: str = ""
    """No other meeting's."""


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

    def enter(self, barrier: str) -> None:
        """A barrier of a door's is entered, which all ranks enter."""
        self.barrier = barrier
        self.num_barriers += 1

    def counts(self) -> dict[str, Any]:
        """The counts that :meth:`beyond` compares."""
        return {"num_started": self.num_started, "num_barriers": self.num_barriers, "calls": self.calls}

    def beyond(self, other: dict[str, Any]) -> str:
        """Says where this rank is, if certainly past the place of the other; else empty. See [Note: evidence]."""
        # Strictly more: an equal count is the very place, and a smaller one a rank that is still to come.
        if self.num_started > other["num_started"]:
            return f"in the {self.last_started[-1]} of a later step"
        if self.num_barriers > other["num_barriers"]:
            return f"in {self.barrier}"
        calls = self.calls
        # Two meetings at one place of the program: neither rank will come to the other's.
        return f"in {calls}" if calls not in ("", other["calls"]) else ""


class Attendant:
    """A thread that answers rank 0 for a rank whose main thread is elsewhere.

    It sleeps in the store's own ``wait``, on a connection of its own, and costs nothing until rank 0 asks. A daemon; at
    the end of the program it stays for :data:`LINGER_S`, unless that ends with an error or rank 0 has ended.
    """

    _FILE_POLL_S = 0.2
    _CLOSE_TIMEOUT_S = 5.0

    def __init__(self, store: Store, rank: int, progress: Progress, handler: Handler, number: int) -> None:
        self._store, self._rank = store, rank
        self._own_store: Store  # the thread makes it
        self._progress, self._handler = progress, handler
        self.number = number  # of the next request
        self._stops = False
        self._active_at = 0.0  # when it last did something; infinite while it does
        # Weakly: atexit would otherwise keep the attendant, and with it the optimizers that it hands over, to the end.
        self._at_exit = functools.partial(_linger, weakref.ref(self))
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="megastrategy-attendant", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; may be called again."""
        atexit.unregister(self._at_exit)
        self._stops = True  # before the number is read: the thread looks after it has changed the number
        with contextlib.suppress(RuntimeError):  # a store that ended has ended the thread's wait, too
            key = self._key()
            # Compared, since rank 0 may have put a request there: it is answered first, and the loop ends by _stops.
            self._store.compare_set(key, "", "stop")
            self._thread.join(self._CLOSE_TIMEOUT_S)
            if self._store.check([key]) and self._store.get(key) == b"stop":
                self._store.delete_key(key)  # rank 0's next request will have that number

    def linger(self) -> None:
        """Stays a while, at the end of a program that ended well: rank 0 may be about to save."""
        came_at = time.monotonic()
        with contextlib.suppress(RuntimeError):
            # From the last request on: rank 0 may take several optimizers' states, one after the other.
            while self._thread.is_alive() and time.monotonic() < max(came_at, self._active_at) + LINGER_S:
                if self._store.check([f"{_ROOT}/ended/0"]):
                    break
                time.sleep(_POLL_S)

    def say_ended(self) -> None:
        _say(self._store, f"{_ROOT}/ended/{self._rank}")

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
                # While it answers, the process must not end: rank 0 would lose the connection in the middle of a shard.
                self._active_at = float("inf")
                self._answer(pickle.loads(request))
                self._active_at = time.monotonic()
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

    def _answer(self, request: dict[str, Any]) -> None:
        if request["kind"] == "where":
            self._look_out(request)
        else:
            self._handler(request, self._own_store)

    def _look_out(self, request: dict[str, Any]) -> None:
        """Watches until the meeting is over, or this rank's main thread is there."""
        key, store = request["key"], self._own_store
        # This rank's own mark, or the outcome: either ends the question.
        while not self._stops and not any(store.check([f"{key}/{end}"]) for end in (self._rank, "outcome")):
            if where := self._progress.beyond(request):
                # Never over an outcome that stands: ranks that have read it are inside already.
                store.compare_set(f"{key}/outcome", "", f"rank {self._rank} is elsewhere, {where}")
                return
            time.sleep(_LOOK_S)


def _linger(reference: weakref.ref[Attendant]) -> None:
    attendant = reference()
    if attendant is None:
        return
    if not getattr(sys, "last_exc", None) and not getattr(sys, "last_value", None):
        attendant.linger()  # not after an error: others learn of it by this process's end
    attendant.say_ended()
    attendant.stop()


def _say(store: Store, key: str) -> None:
    with contextlib.suppress(RuntimeError):  # of a store that is gone
        store.set(key, "1")


class RollCall:
    """The roll calls of one rank; all ranks of a group have one each.

    Args:
        store: of the group, seen by all its ranks.
        rank, size: in the group.
        timeout: of the group's collectives.

    Attributes:
        progress: see :class:`Progress`; the owner counts collectives in it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Only rank 0 is impatient: the others may rightly come early, while it evaluates or saves alone.
        self.patience = min(PATIENCE, timeout) if rank == 0 else timeout
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.progress = Progress()
        self._place = self._alone_at = -1  # in the count of collectives: of the last meeting, and of the last alone
        self._counts: dict[str, int] = {}  # of meetings at that place, by name
        self._num_asked = [0] * size
        self._handler: Any = None
        self._attendant: Attendant | None = None
        self._num_answered = 0

    def attend(self, make: Callable[[], H]) -> H:
        """Has a thread answer rank 0 for this rank from now on, whatever its main thread does; see
        :class:`Attendant`. Returns what ``make`` returned the first time."""
        if self._handler is None:
            self._handler = make()
            if self.rank == 0:
                # Those that linger for rank 0 must learn that it has nothing more to ask.
                weakref.finalize(self, _say, self.store, f"{_ROOT}/ended/0")
        self.resume()
        handler: H = self._handler
        return handler

    def resume(self) -> None:
        """The attendant comes back if it was dismissed."""
        # Rank 0 asks and is never asked.
        if self._attendant is None and self._handler is not None and self.rank != 0:
            self._attendant = Attendant(self.store, self.rank, self.progress, self._handler, self._num_answered)
            self._finalizer = weakref.finalize(self, Attendant.stop, self._attendant)

    def dismiss(self) -> None:
        """Ends the attendant's thread. May be called again."""
        if self._attendant is not None:
            # Else the finalizer would keep the attendant, and stop a thread that has stopped.
            self._finalizer.detach()
            self._attendant.stop()
            # The count goes on with the next attendant: rank 0 numbers its requests through, dismissed or not.
            self._num_answered, self._attendant = self._attendant.number, None

    @contextlib.contextmanager
    def meeting(
        self,
        what: str,
        probe: Callable[[int], object],
        *,
        number: int = 0,
        may_go_alone: bool = False,
        remedy: str = CALL_ON_EVERY_RANK,
    ) -> Iterator[Meeting]:
        """Entered when all ranks have called this with the same ``what``. Where rank 0 goes on alone it enters soon,
        and any other rank that comes after all enters when rank 0 has left.

        Args:
            what: the call, for the message.
            probe: called now and then with a rank that is missed; what it raises, where that rank has ended, goes out.
            number: tells meetings about several things of one kind apart.
            may_go_alone: whether rank 0 may; asked on it alone.
            remedy: the last sentence of the message.

        Raises:
            NotOnAllRanksError: if another rank is elsewhere, calls something else, or does not come in time. Nothing
                was sent, and the ranks may go on together.
        """
        deadline = time.monotonic() + self.patience.total_seconds()
        outcome = ""
        self.progress.calls = what
        try:
            # A failed meeting is skipped by its number, so that ranks that caught the error can meet again.
            while not outcome:
                key = self._next_key(what, number)
                outcome = self._outcome(key, what, deadline, probe, may_go_alone)
        finally:
            # Also after an error: an attendant that went on saying "in state_dict()" would fail other meetings.
            self.progress.calls = ""
        if outcome not in (_COMPLETE, _ALONE):
            raise NotOnAllRanksError(
                f"rank {self.rank}: {what} is spread over the ranks and has to be called on all of them, but "
                f"{outcome}. {remedy}"
            )
        if outcome == _ALONE and self.rank == 0:
            # Nobody has become more likely to come: the next call at this place of the program skips the grace.
            self._alone_at = self.progress.num_started
        if outcome == _ALONE and self.rank != 0:
            # Else this rank goes on and steps, and its attendant no longer has the state that rank 0 came for.
            problem = self._wait_for(f"{key}/over", probe, time.monotonic() + self.timeout.total_seconds())
            if problem:
                raise NotOnAllRanksError(f"rank {self.rank}: rank 0 did not end {what} within {self.timeout}")
        try:
            yield Meeting(outcome == _COMPLETE, key)
        finally:
            if outcome == _ALONE and self.rank == 0:
                self.store.set(f"{key}/over", "1")

    def ask(self, rank: int, request: dict[str, Any]) -> None:
        """Rank 0 has another rank's attendant do something."""
        # Numbered, never overwritten: a request that came while there was no attendant is found by the next one.
        number, self._num_asked[rank] = self._num_asked[rank], self._num_asked[rank] + 1
        self.store.set(f"{_ROOT}/ask/{rank}/{number}", pickle.dumps(request))  # type: ignore[arg-type] # takes bytes

    def answer(self, rank: int, key: str, probe: Callable[[int], object]) -> str:
        """Waits for an attendant's answer under a meeting's key: why it cannot do what was asked; empty if it does."""
        answer, patience_s = f"{key}/answer/{rank}", self.patience.total_seconds() + _ANSWER_S
        problem = self._wait_for(answer, probe, time.monotonic() + patience_s, rank, "answer")
        return problem or self.store.get(answer).decode()

    def say_where(self, where: str, collective: int) -> None:
        """Tells a rank that calls, and has not started rank 0's ``collective``-th collective (from 1), that it waits in
        vain. Called by rank 0 now and then while it waits in that one."""
        if self.rank != 0 or not self.store.check([f"{_ROOT}/caller"]):
            return
        key, num_started = pickle.loads(self.store.get(f"{_ROOT}/caller"))
        # It calls from before the collective in which this rank waits, so neither can reach the other.
        if num_started < collective:
            self.store.compare_set(f"{key}/outcome", "", f"rank 0 is elsewhere, {where}")

    # --- one meeting -------------------------------------------------------------------------------------------------

    def _next_key(self, what: str, number: int) -> str:
        """See [Note: the same meeting]."""
        if self._place != self.progress.num_started:
            self._place = self.progress.num_started
            self._counts.clear()
        name = f"{self._place}/{what}/{number}"
        self._counts[name] = self._counts.get(name, -1) + 1
        return f"{_ROOT}/{name}/{self._counts[name]}"

    def _outcome(self, key: str, what: str, deadline: float, probe: Callable[[int], object], may_go_alone: bool) -> str:
        """Takes part in a meeting and returns its outcome; empty if it had failed before this rank came."""
        store, outcome = self.store, f"{key}/outcome"
        if store.check([outcome]):
            # A rank that comes late joins what succeeded, and starts anew after what failed.
            known = store.get(outcome).decode()
            return known if known in (_COMPLETE, _ALONE) else ""
        # Marked before anything is waited for: rank 0 counts these marks.
        store.set(f"{key}/{self.rank}", what)
        if self.rank == 0:
            found = self._call_the_roll(key, deadline, probe, may_go_alone)
        else:
            store.set(f"{_ROOT}/caller", pickle.dumps((key, self.progress.num_started)))  # type: ignore[arg-type]
            found = self._wait_for(outcome, probe, deadline)
        # The first outcome written holds for all ranks: two that time out at once must not report different ones.
        return found if not found else store.compare_set(outcome, "", found).decode()

    def _call_the_roll(self, key: str, deadline: float, probe: Callable[[int], object], may_go_alone: bool) -> str:
        """Waits for all ranks, on rank 0, and returns the outcome that it proposes."""
        store = self.store
        # A script that saves several optimizers in one place would wait for each of them.
        grace_s = 0.0 if may_go_alone and self._alone_at == self.progress.num_started else GRACE_S
        ask_at, next_probe = time.monotonic() + grace_s, time.monotonic() + _PROBE_S
        has_asked = False
        while missing := [rank for rank in range(self.size) if not store.check([f"{key}/{rank}"])]:
            if store.check([f"{key}/outcome"]):
                # A rank's attendant has found evidence that it will never come.
                return store.get(f"{key}/outcome").decode()
            now = time.monotonic()
            if now >= ask_at and may_go_alone:
                return _ALONE
            if now >= ask_at and not has_asked:
                # Once: an attendant watches by itself until the meeting has its outcome.
                has_asked = True
                for rank in missing:
                    self.ask(rank, {"kind": "where", "key": key, **self.progress.counts()})
            if now > deadline:
                return f"rank(s) {missing} did not call it within {self.patience.total_seconds():g} s"
            if now > next_probe:
                next_probe += _PROBE_S
                for rank in missing:
                    # Before the probe: a program that ended well has said so, and a broken connection would name the
                    # wrong cause.
                    if store.check([f"{_ROOT}/ended/{rank}"]):
                        return f"rank {rank} has ended its program"
                    probe(rank)
            time.sleep(_POLL_S)
        return _COMPLETE

    def _wait_for(
        self, key: str, probe: Callable[[int], object], deadline: float, rank: int = 0, do: str = "call it"
    ) -> str:
        """Returns when a key is there, with an empty string or, if it is an outcome, that; else what is wrong."""
        store, next_probe = self.store, time.monotonic() + _PROBE_S
        while not store.check([key]):
            now = time.monotonic()
            if now > deadline:
                return f"rank(s) [{rank}] did not {do} within {self.patience.total_seconds():g} s"
            # Not at each look: a probe sends. Its own word first, as in _call_the_roll.
            if now > next_probe:
                next_probe += _PROBE_S
                if store.check([f"{_ROOT}/ended/{rank}"]):
                    return f"rank {rank} has ended its program"
                probe(rank)
            time.sleep(_POLL_S)
        return store.get(key).decode() if key.endswith("/outcome") else ""
