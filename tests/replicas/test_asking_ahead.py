"""The question for the next meeting's members, which is asked while the optimizer steps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from megastrategy.core import Collectives, Replicas
from tests.support.patience import HANG_S
from tests.support.replica_processes import Place, run_with_kills
from tests.support.replicas import PATIENCE_S, Case, Hook, HookedLink, prepare, results, run_replicas

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_meeting_but_the_first_has_its_answer(ranks: int) -> None:
    case = Case(ranks=ranks)
    # An epoch ends with a meeting, in whose window the next one begins.
    expected = ["after vote", "question", "before meeting", "after meeting"] * case.num_epochs * case.num_batches
    for points in logged(case, has_two_windows=False):
        assert points == expected


def test_so_has_each_window_of_a_batch() -> None:
    case = Case(num_epochs=1)
    first, second = ([f"{when} meeting{again}" for when in ("before", "after")] for again in ("", " again"))
    for points in logged(case, has_two_windows=True):
        assert points == ["after vote", "question", *second, "after vote", "question", *first] * case.num_batches


def leave_in_the_midst(place: Place, hook: Hook) -> Any:
    """Replica 0 breaks out of its loop; the other one does not vote until the process of replica 0 has ended."""
    pid_file = place.folder / "pid-0"

    points: list[str] = []

    def hook_of_this(point: str) -> None:
        hook(point)
        points.append(point)
        if place.slot == 1 and point == "before vote" and len(run.steps) == 2:
            pid, deadline = int(pid_file.read_text()), time.monotonic() + HANG_S
            while Path(f"/proc/{pid}").exists():
                assert time.monotonic() < deadline, "replica 0 waits for an answer to its question"
                time.sleep(0.02)

    if place.slot == 0:
        pid_file.write_text(str(os.getpid()))
    run = prepare(place.case, place.slot, place.rank, place.address, None, hook_of_this)
    for batch in run.replicas.batches(place.case.batches(0, place.slot, place.rank)):
        run.train_on(batch)
        if place.slot == 0 and len(run.steps) == 3:
            break
    run.replicas.close()
    return run.outcome() | {"points": [point for point in points if point in POINTS]}


def test_a_replica_that_leaves_does_not_wait_for_an_answer_and_the_other_asks_in_its_meetings(tmp_path: Path) -> None:
    case = Case(num_epochs=1, num_batches=5)
    found = run_with_kills(case, [], tmp_path, train=leave_in_the_midst)
    assert [members for _, _, members, _ in found[1][0]["steps"]] == [(0, 1)] * 3 + [(1,)] * 2
    assert len(found[0][0]["steps"]) == 3
    alone = ["after vote", "before meeting", "question", "after meeting"]
    assert found[1][0]["points"][-8:] == alone * 2
