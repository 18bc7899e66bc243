"""Meetings of all replicas, which need no lighthouse, and meetings without one that is missing."""

from __future__ import annotations

import functools
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megastrategy.core import Collectives, Replicas
from tests.support.patience import HANG_S
from tests.support.replica_processes import Place, run_with_kills
from tests.support.replicas import (
    PATIENCE_S,
    Case,
    Hook,
    HookedLink,
    Run,
    assert_equal,
    assert_together,
    prepare,
    results,
    run_replicas,
)

from .test_several_optimizers import Loop

POINTS = {"before meeting", "after meeting", "before meeting again", "after meeting again", "question", "after vote"}


def logged(case: Case, *, has_two_windows: bool) -> list[list[str]]:
    """Returns the points of each rank, from its first vote on."""

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> list[str]:
        points: list[str] = []
        hook = points.append
        if has_two_windows:
            replicas = Replicas(HookedLink(slot, address, hook), of=case.of, slot=slot, patience_s=PATIENCE_S)
            Loop(case, slot, rank, replicas, collectives, zeroes=False).train()
        else:
            prepare(case, slot, rank, address, collectives, hook).train()
        return [point for point in points[points.index("after vote") :] if point in POINTS]

    return [points for by_rank in results(run_replicas(case, job)) for points in by_rank]


@pytest.mark.parametrize("has_two_windows", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_only_the_first_meeting_asks_the_lighthouse(ranks: int, has_two_windows: bool) -> None:
    case = Case(ranks=ranks)
    num_windows = case.num_epochs * case.num_batches * (1 + has_two_windows)
    for points in logged(case, has_two_windows=has_two_windows):
        assert points == ["after vote", "before meeting", "after meeting"] * num_windows


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


def test_two_of_three_keep_their_group_after_a_vote_that_failed_once() -> None:
    """Each of their meetings asks the lighthouse, which makes a new group as long as a failure is reported."""
    case = Case(of=3, num_epochs=1, num_batches=8)

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        numbers = list[int]()
        run = prepare(case, slot, rank, address, collectives)
        run.replicas.link.failing_votes = {3} if slot == 1 else ()  # type: ignore[attr-defined]
        if slot == 2:
            run.replicas.begin_batch()
            run.replicas.finish()
        else:
            run.train(lambda run: numbers.append(run.replicas.link.number))
        return numbers

    for numbers in [by_rank[0] for by_rank in results(run_replicas(case, job))][:2]:
        assert numbers[-1] > numbers[0], "the vote failed"
        assert len(set(numbers[-4:])) == 1


def leave_in_the_midst(place: Place, hook: Hook) -> Any:
    """Replica 0 breaks out of its loop."""
    points: list[str] = []

    def hook_of_this(point: str) -> None:
        hook(point)
        points.append(point)

    run = prepare(place.case, place.slot, place.rank, place.address, None, hook_of_this)
    for batch in run.replicas.batches(place.case.batches(0, place.slot, place.rank)):
        run.train_on(batch)
        if place.slot == 0 and len(run.steps) == 3:
            break
    run.replicas.close()
    return run.outcome() | {"points": [point for point in points if point in POINTS]}


def test_a_replica_that_leaves_does_not_wait_and_the_other_one_asks_the_lighthouse(tmp_path: Path) -> None:
    case = Case(num_epochs=1, num_batches=5)
    found = run_with_kills(case, [], tmp_path, train=leave_in_the_midst)
    assert [members for _, _, members, _ in found[1][0]["steps"]] == [(0, 1)] * 3 + [(1,)] * 2
    assert len(found[0][0]["steps"]) == 3
    alone = ["before meeting", "question", "after meeting"]
    expected = ["after vote", "before meeting", *alone, *["after vote", *alone] * 2]
    assert found[1][0]["points"][-len(expected) :] == expected


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
