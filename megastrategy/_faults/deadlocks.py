"""Notices that a rank waits in a collective that will never complete.

A backend knows when the process at the other end dies. It does not know that this process left what was begun together,
or waits for this rank in another collective. So a rank that waits for long leaves a note in the key-value store that
torch.distributed was started with, and reads the notes of the others.

[Note: when a deadlock is certain]
A note says what its rank waits for, and which collectives of each group it has started. A group carries its collectives
out in order. So rank B needs rank A if it waits for a collective that A has not started, or is behind one in whose
place A has started another.

A rank that waits starts nothing. So while A waits, a rank that needs A cannot go on, however old its note is, and nor
can one that needs that rank. Let S be this rank and all that need it in this way: none of them goes on before this rank
does. If this rank itself needs another member of S, all of S wait for ever. No time enters into this: a slow network is
never taken for a deadlock.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import PrefixStore

from ..core import Collectives
from .recovery import first_failure, first_stopped, store_of


class _Started(NamedTuple):
    """Counts the collectives of a group that a rank has started, and names the kinds of the last of them."""

    total: int
    kinds: list[str]

    def kind(self, number: int) -> str | None:
        """The kind of the ``number``-th collective (from 1); None if it was not started, or so long ago that it is
        forgotten."""
        place = number - 1 - (self.total - len(self.kinds))
        return self.kinds[place] if 0 <= place < len(self.kinds) else None


class _Note(NamedTuple):
    """The collective that a rank waits for, and those that it has started.

    Attributes:
        group: by its name, which the ranks agreed on when they made it: after an exception another group serves the
            same purpose, and its count begins anew.
        what: the collective, with the purpose of its group, for people.
        number: of the collective among those of the group, from 1.
        started: by group.
    """

    group: str
    what: str
    number: int
    started: dict[str, _Started]

    def needs(self, other: _Note) -> bool:
        """Whether it waits for a collective that the other rank had not started, or behind one that differs."""
        mine, theirs = self.started[self.group], other.started.get(self.group, _Started(0, []))
        # a rank that skipped one collective is found by the first pair of kinds that differ, although its count is
        # right. Kinds are kept only for the last collectives; a kind that is forgotten (None) proves nothing
        pairs = (
            (mine.kind(number), theirs.kind(number)) for number in range(max(1, self.number - 64), self.number + 1)
        )
        return theirs.total < self.number or any(None not in pair and pair[0] != pair[1] for pair in pairs)


def _notes_in_store(name: str) -> PrefixStore:
    """The notes of all ranks that wait, until the exception of that name."""
    return store_of(f"exception/{name}/waiting")


def _ends_in_store(name: str) -> PrefixStore:
    """The ranks that have ended the run in which the exception of that name would be."""
    return store_of(f"exception/{name}/ended")


class DeadlockFinder:
    """Finds out why a rank waits in vain: another rank failed or left, or the ranks wait for each other.

    Args:
        name: gives the name of the next exception, see :func:`~.process_collectives.exception_name`.
    """

    GRACE_S = 5.0
    """Seconds from another rank's failure until a waiting rank gives up. Collectives that can complete without that
    rank do so meanwhile, and ranks that fail alike come by themselves."""

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name
        self._failed: tuple[str, float] | None = None  # which exception, and since when
        self._groups: dict[str, Collectives] = {}
        self._place: tuple[str, int] | None = None  # of this rank's note: its exception and number
        self._ended = ""  # the exception in whose run this rank was last, if it has ended that run

    def watch(self, purpose: str, collectives: Collectives) -> Collectives:
        """Asks :meth:`_why_in_vain` from now on while a rank waits in ``collectives``.

        ``purpose`` is what for, in messages.
        """
        name = collectives.group.group_name
        self._groups[name] = collectives
        # On an accelerator ranks wait on their hosts, in a group that counts with the device's.
        collectives.watchdog = collectives.host.watchdog = functools.partial(self._why_in_vain, name, purpose)
        return collectives

    def forget(self) -> None:
        """Drops the groups, whose collectives are given up."""
        self._groups.clear()

    def _why_in_vain(self, group: str, purpose: str, what: str, number: int) -> str:
        """Says why a wait for the ``number``-th collective of a group is in vain; empty if it need not be."""
        name = self._name()
        try:
            # All ranks may have ended the run, and save, or use the optimizer, or go on with a loop of their own.
            ended_early = self._ended_early(name, group, number) if name != self._ended else ""
            if reason := first_stopped(name) or ended_early or self._failure(name):
                return reason
            # no rank counts in a group that was given up: only a failure is known
            return self._deadlock(name, group, f"{purpose} ({what})", number) if group in self._groups else ""
        except RuntimeError:  # the process that held the store ended, and the collective will fail
            return ""

    def is_awaited(self) -> bool:
        """Whether another rank is known to wait in a collective that this one has not started. This one waits in
        none."""
        here = _Note("", "", 0, self._started())
        return any(note.needs(here) for note in self._notes_of_others(self._name()).values())

    def end_run(self, run: str) -> None:
        """Records that this rank has ended its fit, validation or the like, and the collectives that it has started.

        ``run`` says what has ended, and after how many steps.
        """
        self._ended = self._name()
        board = _ends_in_store(self._ended)
        totals = {name: group.progress.num_started for name, group in self._groups.items()}
        end = pickle.dumps((torch.distributed.get_rank(), run, totals))
        board.set(f"{board.add('num', 1) - 1}", end)  # type: ignore[arg-type]

    @staticmethod
    def _ended_early(name: str, group: str, number: int) -> str:
        """Returns which rank has ended its run without the ``number``-th collective of a group; empty if none has."""
        board = _ends_in_store(name)
        for index in range(board.add("num", 0)):
            if not board.check([f"{index}"]):
                continue  # it is about to be written, and is read the next time
            rank, run, totals = pickle.loads(board.get(f"{index}"))
            if totals.get(group, number) < number:
                return (
                    f"rank {rank} has ended {run}, and this rank goes on. Give all ranks the same number of batches (a "
                    "DistributedSampler, or drop_last=True), and stop on all ranks together: trainer.should_stop that "
                    "one rank sets stops that rank only, so reduce the decision first"
                )
        return ""

    def _started(self) -> dict[str, _Started]:
        return {
            name: _Started(group.progress.num_started, list(group.progress.last_started))
            for name, group in self._groups.items()
        }

    def _write_note(self, name: str, own: _Note) -> None:
        """Writes this rank's note, in place of the one before."""
        board = _notes_in_store(name)
        # Numbered as ranks come, and not by rank: readers ask for all at once, and most ranks have none.
        if self._place is None or self._place[0] != name:
            self._place = name, board.add("num", 1) - 1
        board.set(f"{self._place[1]}", pickle.dumps((torch.distributed.get_rank(), own)))  # type: ignore[arg-type]

    @staticmethod
    def _notes_of_others(name: str) -> dict[int, _Note]:
        """Reads the notes of other ranks, by rank, in three requests, however many ranks there are: of all ranks that
        wait, each reads every second."""
        board = _notes_in_store(name)
        keys = [f"{number}" for number in range(board.add("num", 0))]
        # One that is counted may be about to be written. Its rank reads the others' after that.
        if keys and not board.check(keys):
            keys = [key for key in keys if board.check([key])]
        notes = dict(map(pickle.loads, board.multi_get(keys) if keys else ()))
        notes.pop(torch.distributed.get_rank(), None)
        return notes

    def _failure(self, name: str) -> str:
        failure = first_failure(name)
        if failure and (self._failed is None or self._failed[0] != name):
            self._failed = name, time.monotonic()
        return failure if self._failed is not None and time.monotonic() - self._failed[1] > self.GRACE_S else ""

    def _deadlock(self, name: str, group: str, what: str, number: int) -> str:
        """Says which ranks wait where, if they wait for each other; see [Note: when a deadlock is certain]."""
        rank, own = torch.distributed.get_rank(), _Note(group, what, number, self._started())
        # before the others' notes are read: of two ranks that write at the same moment, at least one reads both
        self._write_note(name, own)
        notes = self._notes_of_others(name)
        # ``stuck`` grows to S of the note: this rank, those that need it, those that need one of these
        stuck = {rank: own}
        while found := {r: n for r, n in notes.items() if r not in stuck and any(map(n.needs, stuck.values()))}:
            stuck |= found
        # others may be stuck behind a rank that is only slow. Without a cycle through this rank nothing is certain
        if not any(own.needs(note) for other, note in stuck.items() if other != rank):
            return ""
        places = "; ".join(f"rank {r} waits {note.what}" for r, note in sorted(stuck.items()))
        return (
            f"the ranks wait for each other: {places}. Most often a training_step ended before its backward, or before "
            "its step, on some ranks only (let such a rank run its backward too, with loss * 0.0), or a barrier, a "
            "checkpoint or a log with sync_dist=True was for some ranks only (all ranks save and log)"
        )
