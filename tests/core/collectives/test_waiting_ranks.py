"""Before a rank check, a rank waits for its started collectives: that wait is watched, and answers other ranks."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore

from megastrategy.core.collectives import BackendCollectives, Collectives, GlooCollectives
from megastrategy.core.collectives.rank_check import RankCheck
from megastrategy.core.errors import CollectiveError, NotOnAllRanksError
from tests.support.ranks import run_ranks, with_instances

TIMEOUT_S = 30.0


def rank_check(group: ProcessGroup) -> RankCheck:
    store = PrefixStore("check", group.get_group_store())
    return RankCheck(store, group.rank(), group.size(), timedelta(seconds=TIMEOUT_S))


def test_a_watchdog_ends_the_wait_for_collectives_before_a_rank_check() -> None:
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


def test_an_error_of_another_call_says_where_rank_zero_waits() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        collectives = GlooCollectives(group, rank_check(group))
        if rank == 1:
            with pytest.raises(NotOnAllRanksError, match="rank 0 is elsewhere, waiting in all-reduce"):
                collectives.require_all_ranks("main_params()")
        summed = torch.ones(4)
        collectives.all_reduce(summed, 1.0)
        collectives.require_all_ranks("state_dict()")
        assert summed.tolist() == [2.0] * 4, "it had ended when the ranks met"
        collectives.close()

    start = time.monotonic()
    run_ranks(2, run)
    assert time.monotonic() - start < TIMEOUT_S / 2


@pytest.mark.parametrize("kind", [GlooCollectives, BackendCollectives])
@pytest.mark.real_collectives("gives the real ones a rank check")
def test_collectives_of_an_instance_are_evidence_of_progress(kind: type[Collectives]) -> None:
    """Rank 0 calls something that the others have left for the next reduction, inside their instances."""

    def run(rank: int, group: ProcessGroup) -> float:
        every = with_instances(group, 2, kind)  # type: ignore[arg-type]
        every.rank_check = calls = rank_check(group)
        every.progress = calls.progress
        calls.start_responder()
        inside = every.instances[2]
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(NotOnAllRanksError, match="is elsewhere, in the reduce-scatter of a later step"):
                every.require_all_ranks("state_dict()")
        seconds = time.monotonic() - start
        inside.reduce_scatter(torch.ones(4), 1.0).wait()
        inside.reduce_scatter_into(torch.zeros(2), torch.ones(4), 1.0).wait()
        inside.all_gather(torch.ones(4)).wait()
        assert list(every.progress.last_started) == ["reduce-scatter", "reduce-scatter", "all-gather"]
        every.close()
        return seconds

    assert max(run_ranks(4, run)) < TIMEOUT_S / 2


def test_a_rank_goes_on_when_the_process_of_the_store_has_just_ended() -> None:
    """Its thread for rank 0 connects anew, which torch attempts for the store's timeout; the rank itself learns of the
    end by its next collective."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=1.0))
    del host
    calls = RankCheck(PrefixStore("check", store), 1, 2, timedelta(seconds=TIMEOUT_S))
    calls.start_responder()
    calls.stop_responder()
