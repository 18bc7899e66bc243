"""Finding out that all ranks are here before a collective that users forget to call on all of them.

Saving is the place: ``if rank == 0: torch.save(optimizer.state_dict())`` is right with a whole optimizer and would
wait for ever with a sharded one. So ranks meet in the key-value store of their group first, where one that is missed
can be named, and one that waits elsewhere can say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from .errors import NotOnAllRanksError

PATIENCE = timedelta(seconds=60)
"""How long rank 0 waits for the others, which have no reason to be late; they wait for it as long as for a collective,
since it may be evaluating or saving something alone."""

_POLL_S = 0.01
_PROBE_S = 0.5


class RollCall:
    """The roll calls of one rank; all ranks of a group have one each.

    Args:
        store: of the group, seen by all its ranks.
        rank, size: in the group.
        timeout: of the group's collectives.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.patience = min(PATIENCE, timeout) if rank == 0 else timeout
        self._store, self._rank, self._size = store, rank, size
        self._number = 0

    def answer(self, what: str, num_collectives: int, probe: Callable[[int], object]) -> None:
        """Returns when all ranks have called this with the same ``what``.

        Args:
            what: the call that needs all ranks, for the message.
            num_collectives: how many collectives of the group this rank has started; all of them are done.
            probe: called now and then with a rank that is missed; what it raises, where that rank has ended, goes out.

        Raises:
            NotOnAllRanksError: if another rank waits in a collective that this one has not started, calls something
                else, or does not come in time. Nothing was sent, and the ranks may go on together.
        """
        deadline = time.monotonic() + self.patience.total_seconds()
        while True:
            number, self._number = self._number, self._number + 1
            if self._is_complete(number, what, num_collectives, deadline, probe):
                return

    def say_where(self, where: str, collective: int) -> None:
        """To be called now and then by a rank that waits in the ``collective``-th collective it has started, counted
        from 1: if others call the roll and have not started that one, they learn that they wait in vain."""
        key = f"megastrategy/roll/{self._number}"
        if self._store.check([f"{key}/first"]) and int(self._store.get(f"{key}/first")) < collective:
            self._store.set(f"{key}/problem", f"rank {self._rank} is elsewhere, {where}")

    def _is_complete(
        self, number: int, what: str, num_collectives: int, deadline: float, probe: Callable[[int], object]
    ) -> bool:
        """Whether all came; False if the ranks that called this number have given it up before this one came."""
        store, key = self._store, f"megastrategy/roll/{number}"
        if store.check([f"{key}/outcome"]) and store.get(f"{key}/outcome") != b"complete":
            return False
        store.compare_set(f"{key}/first", "", str(num_collectives))
        store.set(f"{key}/{self._rank}", what)
        problem, next_probe = "", time.monotonic() + _PROBE_S
        while missing := [rank for rank in range(self._size) if not store.check([f"{key}/{rank}"])]:
            if store.check([f"{key}/problem"]):
                problem = store.get(f"{key}/problem").decode()
            elif time.monotonic() > deadline:
                problem = f"rank(s) {missing} did not call it within {self.patience.total_seconds():g} s"
            if problem or store.check([f"{key}/outcome"]):
                break
            if time.monotonic() > next_probe:
                next_probe += _PROBE_S
                for rank in missing:
                    probe(rank)
            time.sleep(_POLL_S)
        problem = store.compare_set(f"{key}/outcome", "", problem or "complete").decode()  # the first decides for all
        if problem == "complete":
            calls = [store.get(f"{key}/{rank}").decode() for rank in range(self._size)]
            if len(set(calls)) == 1:
                return True
            problem = "; ".join(f"rank {rank} called {call}" for rank, call in enumerate(calls))
        raise NotOnAllRanksError(_message(self._rank, what, problem))


def _message(rank: int, what: str, problem: str) -> str:
    return (
        f"rank {rank}: {what} is spread over the ranks and has to be called on all of them, but {problem}. Call it on "
        "every rank, and save what it returns on rank 0:\n"
        "    state = optimizer.state_dict()\n"
        "    if rank == 0:\n"
        "        torch.save(state, path)"
    )
