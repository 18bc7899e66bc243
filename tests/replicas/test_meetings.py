"""Meetings of all replicas, which need no lighthouse, and meetings without one that is missing."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any

import pytest
from torch import Tensor

from megastrategy.core import Collectives
from tests.support.patience import HANG_S
from tests.support.replicas import (
    Case,
    Run,
    assert_equal,
    assert_together,
    prepare,
    results,
    run_replicas,
)


def test_all_ranks_of_a_replica_meet_again_if_one_misses_a_member() -> None:
    case = Case(ranks=2)

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        def hook(point: str) -> None:
            if (slot, rank, point, len(run.steps)) == (0, 0, "before meeting", 3) and not link.failure:
                link.fail()

        run = prepare(case, slot, rank, address, collectives, hook, patience_s=10.0)
        link: Any = run.replicas.link
        run.train()
        return run.outcome()

    found = results(run_replicas(case, job))
    assert_together(case, found)


@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_batch_is_lost_if_one_of_three_alone_misses_the_others(ranks: int, num_losses: int) -> None:
    """They go on to their sums. If it misses the facts of its next meeting, too, they repeat the sums twice."""
    case = Case(of=3, ranks=ranks, num_epochs=1, num_batches=6)
    have_met = threading.Barrier(case.of * case.ranks)

    def job(slot: int, rank: int, address: str, collectives: Collectives, *, loses: bool) -> Any:
        points: list[str] = []
        run = prepare(case, slot, rank, address, collectives, points.append)
        link: Any = run.replicas.link
        num_lost, max_ = 0, link.max_

        def max_and_lose(numbers: Tensor) -> None:
            nonlocal num_lost
            max_(numbers)
            if not loses or len(run.steps) != 3 or num_lost == num_losses:
                return
            num_lost += 1
            if num_lost == 1:
                have_met.wait(HANG_S)
            if (slot, rank) == (1, ranks - 1):
                link._drop_group()

        link.max_ = max_and_lose
        run.train()
        assert points.count("before meeting again") >= (num_losses if loses and slot != 1 else 0)
        return run.outcome()

    found, expected = (results(run_replicas(case, functools.partial(job, loses=loses))) for loses in (True, False))
    for mine, theirs in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert_equal(mine, theirs)
        assert mine["steps"] == theirs["steps"] == [(0, number, (0, 1, 2), True) for number in range(6)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_of_three_meet_again_if_a_decision_between_two_steps_failed_in_one(ranks: int) -> None:
    """Rank 0 makes it, as in a Trainer. The lighthouse knows of no failure, and a rank that has left its group would
    wait for others that have not."""
    case = Case(of=3, ranks=ranks, num_epochs=1)

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        points: list[str] = []
        run = prepare(case, slot, rank, address, collectives, points.append, skew_s=20.0)
        if slot == 2:
            run.replicas.begin_batch()
            run.replicas.finish()
            return None
        link: Any = run.replicas.link

        def decide(run: Run) -> None:
            if len(run.steps) != 2:
                return
            points.clear()
            if rank == 0:
                assert run.replicas.max_of_bytes(bytes([slot])) == bytes([1])
                if slot == 0:
                    link._drop_group()

        run.train(decide)
        assert "before meeting again" not in points, "all are in a new group before the next step"
        assert run.replicas.num_taken == 0, "the step before is not undone"
        return run.outcome()

    first, second, _ = results(run_replicas(case, job, skew_s=20.0))
    for mine, theirs in zip(first, second, strict=True):
        assert_equal(mine, theirs)
        assert mine["steps"] == theirs["steps"] == [(0, number, (0, 1), True) for number in range(case.num_batches)]


class LeftError(Exception):
    """Ends a replica."""


def test_a_replica_that_takes_the_state_below_the_minimum_waits_with_the_others() -> None:
    """The third ends after its vote, the vote of the second fails: the first waits for three before its next batch."""
    case = Case(of=3, num_epochs=1, num_batches=6, minimum=3)

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        lives: list[Run] = []
        points: list[str] = []

        def hook(point: str) -> None:
            points.append(point)
            if len(lives) > 1 or points.count(point) != 3:
                return
            if (slot, point) == (1, "before vote"):
                lives[0].replicas.link.fail()  # type: ignore[attr-defined]
            if (slot, point) == (2, "after vote"):
                raise LeftError

        while True:
            lives.append(prepare(case, slot, rank, address, collectives, hook))
            try:
                lives[-1].train()
            except LeftError:
                continue
            return [run.steps for run in lives], lives[-1].outcome()

    [[first], [second], [third]] = results(run_replicas(case, job))
    together = (0, 1, 2)
    assert first[0] == [[(0, number, together, True) for number in range(6)]]
    assert second[0] == [[(0, number, together if number != 2 else (0, 1), number != 2) for number in range(6)]]
    assert third[0] == [[(0, 0, together, True), (0, 1, together, True)], [(0, n, together, True) for n in range(3, 6)]]
    assert_equal(first[1], second[1])
    assert_equal(first[1], third[1])
