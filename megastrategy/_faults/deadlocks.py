"""Noticing that a rank waits in a collective that will never complete.

A backend knows when the process at the other end dies, but not that it has left what was begun together, or that it
waits itself, for this rank, in another collective. Whoever waits for long leaves a note in the key-value store that
torch.distributed was started with, and reads the others'.

[Note: when a deadlock is certain]
A rank notes what it waits for, and which collectives of each group it has started. I wait, so I start nothing.
Whoever waits for a collective that I have not started is stuck with me, however old its note, and so is one that has
started another in its place, since they are carried out in order; whoever waits for one that such a rank has not
started is stuck too. If I wait so for one of those, all of us wait for ever. No time is involved: a slow network is
not taken for a deadlock.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..core import Collectives
from .recovery import store_of, who_left


class _Started(NamedTuple):
    """How many collectives of a group a rank has started, and the kinds of the last of them."""

    total: int
    kinds: list[str]

    def kind(self, number: int) -> str | None:
        """Of the ``number``-th, if it is known."""
        place = number - 1 - (self.total - len(self.kinds))
        return self.kinds[place] if 0 <= place < len(self.kinds) else None


class _Note(NamedTuple):
    group: str
    what: str
    number: int
    started: dict[str, _Started]

    def needs(self, other: _Note) -> bool:
        """Whether it waits for a collective that the other rank had not started, or behind one that differs."""
        mine, theirs = self.started[self.group], other.started.get(self.group, _Started(0, []))
        pairs = (
            (mine.kind(number), theirs.kind(number)) for number in range(max(1, self.number - 64), self.number + 1)
        )
        return theirs.total < self.number or any(None not in pair and pair[0] != pair[1] for pair in pairs)


class WaitsInVain:
    """Says why a rank waits in vain: another rank failed, or the ranks wait for each other.

    Args:
        name: gives the name of the next exception, see :func:`~.process_collectives.exception_name`.
    """

    GRACE_S = 5.0
    """How long after another rank failed: what can still complete without that rank does so, and ranks that fail alike
    come by themselves."""

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name
        self._failed: tuple[str, float] | None = None  # which exception, and since when
        self._groups: dict[str, Collectives] = {}

    def watch(self, group: str, collectives: Collectives) -> Collectives:
        """From now on those who wait in ``collectives``, called ``group`` in messages, are told."""
        self._groups[group] = collectives
        collectives.why_give_up = functools.partial(self._ask, group)
        return collectives

    def forget(self) -> None:
        """The collectives are given up."""
        self._groups.clear()

    def _ask(self, group: str, what: str, number: int) -> str:
        """Why a wait for the ``number``-th collective of a group is in vain; empty if it need not be."""
        name = self._name()
        try:
            return who_left(name) or self._failure(name) or self._deadlock(name, group, what, number)
        except RuntimeError:  # the process that held the store ended, and the collective will fail
            return ""

    def is_awaited(self) -> bool:
        """Whether another rank is known to wait in a collective that this one, which is in none, has not started."""
        here = _Note("", "", 0, self._started())
        return any(note.needs(here) for note in self._notes_of_others(self._name()).values())

    def _started(self) -> dict[str, _Started]:
        return {
            label: _Started(member.num_started, list(member.last_started)) for label, member in self._groups.items()
        }

    @staticmethod
    def _notes_of_others(name: str) -> dict[int, _Note]:
        store, rank = store_of(f"exception/{name}/waiting"), torch.distributed.get_rank()
        others = [other for other in range(torch.distributed.get_world_size()) if other != rank]
        return {other: pickle.loads(store.get(f"{other}")) for other in others if store.check([f"{other}"])}

    def _failure(self, name: str) -> str:
        store = store_of(f"exception/{name}")
        if not store.check(["first"]):
            return ""
        if self._failed is None or self._failed[0] != name:
            self._failed = name, time.monotonic()
        return store.get("first").decode() if time.monotonic() - self._failed[1] > self.GRACE_S else ""

    def _deadlock(self, name: str, group: str, what: str, number: int) -> str:
        """See [Note: when a deadlock is certain]."""
        store, rank = store_of(f"exception/{name}/waiting"), torch.distributed.get_rank()
        own = _Note(group, what, number, self._started())
        store.set(f"{rank}", pickle.dumps(own))  # type: ignore[arg-type]  # bytes are taken
        notes = self._notes_of_others(name)
        stuck = {rank: own}
        while found := {r: n for r, n in notes.items() if r not in stuck and any(map(n.needs, stuck.values()))}:
            stuck |= found
        if not any(own.needs(note) for other, note in stuck.items() if other != rank):
            return ""
        places = "; ".join(f"rank {r} waits {note.group} ({note.what})" for r, note in sorted(stuck.items()))
        return (
            f"the ranks wait for each other: {places}. Most often a training_step ended before its backward, or before "
            "its step, on some ranks only (let such a rank run its backward too, with loss * 0.0), or a barrier, a "
            "checkpoint or a log with sync_dist=True was for some ranks only (all ranks save and log)"
        )
