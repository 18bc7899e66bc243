"""Before a rank check, a rank waits for its started collectives: that wait is watched, and answers other ranks."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroup

from megastrategy.core.collectives import GlooCollectives
from megastrategy.core.collectives.rank_check import RankCheck
from megastrategy.core.errors import CollectiveError
from tests.support.ranks import run_ranks

TIMEOUT_S = 30.0


def rank_check(group: ProcessGroup) -> RankCheck:
    store = PrefixStore("check", group.get_group_store())
    return RankCheck(store, group.rank(), group.size(), timedelta(seconds=TIMEOUT_S))


def test_watchdog_ends_wait_before_rank_check() -> None:
    """A peer that raised and lives takes no part in the collective, and gloo would wait until the timeout."""
    is_over = threading.Event()

    def run(rank: int, group: ProcessGroup) -> float:
        collectives = GlooCollectives(group, rank_check(group))
        start = time.monotonic()
        if rank == 0:
            collectives.watchdog = lambda what, number: f"{what} {number} will not end"
            collectives.all_reduce(torch.ones(4), 1.0)  # as a backward leaves it: started, and waited for later
            try:
                with pytest.raises(CollectiveError, match="given up: all-reduce 1 will not end"):
                    collectives.require_all_ranks("state_dict()")
            finally:
                is_over.set()
        else:
            is_over.wait(2 * TIMEOUT_S)
        seconds = time.monotonic() - start
        if rank == 1:  # else rank 0's thread stays in there, and ends this process badly when that ends
            collectives.all_reduce(torch.ones(4), 1.0).wait()
        return seconds

    assert max(run_ranks(2, run)) < TIMEOUT_S / 2
