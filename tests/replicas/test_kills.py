"""Processes that are killed in the midst of a step, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.replica_processes import POINTS, Kill, logged_steps, run_with_kills
from tests.support.replicas import Case, assert_equal, assert_replayed, members_by_step


def check(case: Case, kills: list[Kill], folder: Path, **options: Any) -> dict[tuple[int, int], tuple[int, ...]]:
    """Runs the training; returns who stepped when, after the checks that hold whatever is killed."""
    found = run_with_kills(case, kills, folder, **options)
    for by_rank in found[1:]:
        for mine, theirs in zip(found[0], by_rank, strict=True):
            assert_equal(mine, theirs)
    logged = logged_steps(folder)
    steps = members_by_step(logged)
    assert sorted(steps) == [(e, b) for e in range(case.num_epochs) for b in range(case.num_batches)]
    assert_replayed(case, found[0][0]["weights"], steps)
    for slot in set(range(case.of)) - {kill.slot for kill in kills}:
        assert [step[:2] for step in found[slot][0]["steps"]] == sorted(steps), "a survivor ran each batch once"
    return steps


@pytest.mark.sample(3)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_at_any_point_of_a_step(point: str, ranks: int, tmp_path: Path) -> None:
    case = Case(ranks=ranks, num_epochs=2, num_batches=10)
    steps = check(case, [Kill(1, ranks - 1, point)], tmp_path)
    assert (0,) in steps.values(), "the other one went on alone"
    assert steps[1, 9] == (0, 1), "it came back"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case",
    [
        Case("momentum", ranks=2, num_batches=10),
        Case(dtype=torch.bfloat16, ranks=2, num_batches=10),
        Case("muon", ranks=2, num_batches=10),
    ],
    ids=("momentum", "bf16", "muon"),
)
def test_the_first_rank_of_the_leader_is_killed(case: Case, tmp_path: Path) -> None:
    """The others' group was made over its store, and it served the state."""
    steps = check(case, [Kill(0, 0, "after sum 0", step=4)], tmp_path)
    assert (1,) in steps.values()
    assert steps[1, 9] == (0, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_while_it_takes_the_state_of_another_replica(rank: int, tmp_path: Path) -> None:
    case = Case(ranks=2, num_epochs=2, num_batches=12)
    steps = check(case, [Kill(1, 1, "after sum 0"), Kill(1, rank, "taking", step=0, life=1)], tmp_path)
    assert steps[1, 11] == (0, 1)


@pytest.mark.parametrize("is_taker_killed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_replica_is_killed_while_another_takes_its_state(is_taker_killed: bool, tmp_path: Path) -> None:
    """The one that comes back takes it from the third replica, and so do both if it is killed as well."""
    case = Case(of=3, num_epochs=2, num_batches=16)
    kills = [Kill(1, 0, "before vote"), Kill(0, 0, "serving", step=0)]
    kills += [Kill(1, 0, "asking", step=0, life=1)] * is_taker_killed
    found = run_with_kills(case, kills, tmp_path)
    for other in found[1:]:
        assert_equal(found[0][0], other[0])
    assert (tmp_path / "ready-0-0-1").exists(), "it was killed, and came back"
    assert (tmp_path / "ready-1-0-2").exists() == is_taker_killed
    assert members_by_step(logged_steps(tmp_path))[1, 15] == (0, 1, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("point", ["after sum 0", "before vote"])
def test_one_of_three_is_killed(point: str, tmp_path: Path) -> None:
    """Both others redo the batch, and agree."""
    case = Case(of=3, num_epochs=1, num_batches=16)
    found = run_with_kills(case, [Kill(1, 0, point, step=4)], tmp_path)
    for other in found[1:]:
        assert_equal(found[0][0], other[0])
    steps = members_by_step(logged_steps(tmp_path))
    assert (0, 2) in steps.values()
    assert steps[0, 15] == (0, 1, 2)


@pytest.mark.parametrize(
    ("accumulate", "point", "step", "is_dropped"),
    [
        (1, "before sum 0", 3, True),
        (2, "after sum 0", 3, True),
        (2, "before vote", 3, False),
        (1, "before sum 0", 1, True),
    ],
)
def test_below_the_minimum_a_batch_is_dropped(
    accumulate: int, point: str, step: int, is_dropped: bool, tmp_path: Path
) -> None:
    """Also one of several microbatches, which a replica that joins now would not have all, and the very first one."""
    case = Case(num_epochs=2, num_batches=10, accumulate=accumulate, minimum=2)
    found = run_with_kills(case, [Kill(1, 0, point, step)], tmp_path)
    assert_equal(found[0][0], found[1][0])
    ends = [(epoch, number) for epoch in range(2) for number in range(10) if case.ends_window(number)]
    steps = members_by_step(logged_steps(tmp_path))
    assert set(ends) - set(steps) == ({ends[step - 1]} if is_dropped else set())
    assert set(steps.values()) == {(0, 1)}
    assert [step[:2] for step in found[0][0]["steps"]] == ends, "the survivor ran each batch once"
    assert_replayed(case, found[0][0]["weights"], steps)


def test_a_stopped_replica_ends_and_comes_back(tmp_path: Path) -> None:
    """The others go on after the time-out of the sum; it was left out, and must not step alone."""
    case = Case(num_epochs=2, num_batches=8)
    steps = check(case, [Kill(1, 0, "before sum 0", step=3, stopped_s=14.0)], tmp_path, skew_s=5.0)
    assert (0,) in steps.values()
    assert steps[1, 7] == (0, 1)
