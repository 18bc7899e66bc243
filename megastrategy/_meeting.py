"""What ranks may still do together after an exception on one of them.

A collective may have been cut off anywhere by then, so ranks meet over the key-value store that torch.distributed was
started with, and wait for each other for a bounded time. If all come, with states that belong together, a checkpoint
can be saved although its optimizer state is spread over them; if not, everybody knows, and nobody hangs.
"""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

PATIENCE = timedelta(seconds=20)
"""How long a rank waits for the others. Those that were interrupted too (a signal, an error that all ranks meet) come
at once; one that waits in a collective for a rank that failed comes only when that rank's process ends."""

_POLL_S = 0.02


class Meeting:
    """One exception's meeting of all ranks.

    Args:
        number: how many exceptions there were before in this world; the same on ranks that are in step.
        state: what must be equal on all ranks for them to do anything together; a short text.
        patience: how long to wait for the others.

    Attributes:
        problem: why nothing can be done together, or an empty string.
    """

    def __init__(self, number: int, state: str, patience: timedelta) -> None:
        self._rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        store = torch.distributed.distributed_c10d._get_default_store()
        self._store = PrefixStore(f"megastrategy/exception/{number}", store)
        self._num_exchanges = 0
        self.problem = ""
        states = self.exchange(state, patience)
        if not self.problem and len(set(states)) > 1:
            by_rank = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(states))
            self.problem = f"the ranks were interrupted at different points ({by_rank})"

    def exchange(self, value: Any, patience: timedelta) -> list[Any]:
        """Every rank's picklable ``value``, by rank, when all have called this; ``[value]`` if there is a problem.

        A rank that waited in vain, or whose store is gone with the process that held it, has a problem from then on,
        and tells the others, who have it too.
        """
        if self.problem:
            return [value]
        self._num_exchanges += 1
        try:
            return self._exchange(f"{self._num_exchanges}", value, patience)
        except RuntimeError as error:
            self.problem = f"the store of torch.distributed is gone: {error}"
            return [value]

    def _exchange(self, key: str, value: Any, patience: timedelta) -> list[Any]:
        store, deadline = self._store, time.monotonic() + patience.total_seconds()
        store.set(f"{key}/{self._rank}", pickle.dumps(value))  # type: ignore[arg-type]  # bytes are taken
        store.add(f"{key}/arrived", 1)
        while store.add(f"{key}/arrived", 0) < self._size and not store.check([f"{key}/outcome"]):
            if time.monotonic() > deadline:
                store.compare_set(f"{key}/outcome", "", "given up")
            time.sleep(_POLL_S)
        if store.compare_set(f"{key}/outcome", "", "complete") != b"complete":  # whoever writes first decides for all
            missing = [rank for rank in range(self._size) if not store.check([f"{key}/{rank}"])]
            self.problem = f"rank(s) {missing} did not come within {patience.total_seconds():g} s"
            return [value]
        return [pickle.loads(store.get(f"{key}/{rank}")) for rank in range(self._size)]
