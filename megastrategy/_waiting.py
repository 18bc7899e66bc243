"""Noticing that a rank waits in a collective that will never complete.

A backend knows when the process at the other end dies, but not that it has left what was begun together, or that it
waits itself, for this rank, in another collective. Whoever waits for long leaves a note in the key-value store that
torch.distributed was started with, and reads the others'.

[Note: when a deadlock is certain]
A rank notes what it waits for, and how many collectives of each group it has started. I wait, so I start nothing.
Whoever waits for a collective that I have not started is stuck with me, however old its note; whoever waits for one
that such a rank has not started is stuck too. If I wait for a collective that one of those has not started, all of
us wait for ever. No time is involved, so a slow network is not taken for a deadlock.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ._meeting import store_of
from .core import Collectives


class _Note(NamedTuple):
    group: str
    what: str
    number: int
    num_started: dict[str, int]

    def needs(self, other: _Note) -> bool:
        """Whether it waits for a collective that the other rank had not started."""
        return other.num_started.get(self.group, 0) < self.number


class WaitsInVain:
    """Says why a rank waits in vain: another rank failed, or the ranks wait for each other.

    Args:
        name: gives the name of the next exception, see :func:`~megastrategy._world.exception_name`.
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
            return self._failure(name) or self._deadlock(name, group, what, number)
        except RuntimeError:  # the process that held the store ended, and the collective will fail
            return ""

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
        own = _Note(group, what, number, {label: member.num_started for label, member in self._groups.items()})
        store.set(f"{rank}", pickle.dumps(own))  # type: ignore[arg-type]  # bytes are taken
        others = [other for other in range(torch.distributed.get_world_size()) if other != rank]
        notes = {other: pickle.loads(store.get(f"{other}")) for other in others if store.check([f"{other}"])}
        stuck = {rank: own}
        while found := {r: n for r, n in notes.items() if r not in stuck and any(map(n.needs, stuck.values()))}:
            stuck |= found
        if not any(own.needs(note) for other, note in stuck.items() if other != rank):
            return ""
        places = "; ".join(f"rank {r} waits {note.group} ({note.what})" for r, note in sorted(stuck.items()))
        return (
            f"the ranks wait for each other: {places}. Most often a training_step ended before its backward, or before "
            "its step, on some ranks only: let such a rank run its backward too, with loss * 0.0"
        )
