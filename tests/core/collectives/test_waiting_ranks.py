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


@pytest.mark.real_collectives("gives the real ones a rank check")
def test_rank_that_waits_in_its_instance_ends_a_check_it_has_passed() -> None:
    """Rank 0 calls something that the others have left for the next reduction, inside their instances."""

    def run(rank: int, group: ProcessGroup) -> float:
        every = with_instances(group, 2, GlooCollectives)
        every.rank_check = calls = rank_check(group)
        every.progress = calls.progress
        inside = every.instances[2]
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(NotOnAllRanksError, match="is elsewhere, waiting in reduce-scatter"):
                every.require_all_ranks("state_dict()")
        seconds = time.monotonic() - start
        inside.reduce_scatter(torch.ones(4), 1.0).wait()
        inside.reduce_scatter_into(torch.zeros(2), torch.ones(4), 1.0).wait()
        inside.all_gather(torch.ones(4)).wait()
        assert every.progress.num_started == 5, "two hops for each reduction"
        every.close()
        return seconds

    assert max(run_ranks(4, run)) < TIMEOUT_S / 2


def test_rank_in_a_barrier_of_a_door_will_not_come() -> None:
    """It does not look there; it has reported that it enters one more than rank 0."""
    is_over = threading.Event()

    def run(rank: int, group: ProcessGroup) -> None:
        check = rank_check(group)
        check.enter_barrier("accelerator.gather()")  # on both ranks: no evidence
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(NotOnAllRanksError, match=r"rank 1 is elsewhere, in accelerator.gather\(\)"):
                check.wait_for_all("state_dict()", lambda rank: None)
            is_over.set()
        else:
            time.sleep(1.5)
            check.enter_barrier("accelerator.gather()")
            is_over.wait(TIMEOUT_S)
        assert 1.5 < time.monotonic() - start < TIMEOUT_S / 2

    run_ranks(2, run)


def test_places_of_several_ranks_in_other_checks_do_not_hide_each_other() -> None:
    """Ranks 1 and 2 are in two checks, and write their places over each other's; rank 0 waits in a collective."""

    def run(rank: int, group: ProcessGroup) -> float:
        check = rank_check(group)
        start = time.monotonic()
        if rank == 0:
            while time.monotonic() - start < 4.0:
                check.report_waiting("all-reduce", 1)
                time.sleep(0.1)
        else:
            with pytest.raises(NotOnAllRanksError, match="rank 0 is elsewhere, waiting in all-reduce"):
                check.wait_for_all(f"call {rank}", lambda rank: None)
        return time.monotonic() - start

    assert max(run_ranks(3, run)) < TIMEOUT_S / 2
