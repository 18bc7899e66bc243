"""Long trainings of processes: resources after many kills, large sums that end in the middle, a stopped replica."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.replica_processes import POINTS, Kill, Place, logged_steps, run_with_kills, train_plainly
from tests.support.replicas import HEARTBEAT_S, Case, Hook, Run, assert_equal, assert_replayed, members_by_step, prepare

TIMEOUT_S = 1700.0
_LAST_KILLS_EPOCH, _PAUSE_S, _STEPS_OF_A_LIFE = 7, 0.25, 40


@dataclasses.dataclass(frozen=True)
class Usage:
    """The resources of a process after one step."""

    num_files: int
    num_threads: int
    resident_bytes: int

    @classmethod
    def of_this_process(cls) -> Usage:
        folder = Path("/proc/self")
        pages = int((folder / "statm").read_text().split()[1])
        return cls(len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir())), 4096 * pages)


def logged_usage(folder: Path, slot: int, rank: int) -> list[Usage]:
    """The resources of the first process of a rank, after each step."""
    return [Usage(**json.loads(line)) for line in (folder / f"{slot}-{rank}-0.usage").read_text().splitlines()]


def train_slowly(place: Place, hook: Hook) -> Any:
    """A training that logs its resources, and in whose last epochs nothing is killed."""

    def until_the_last_epochs(point: str) -> None:
        if point == "before meeting" or run.replicas.epoch <= _LAST_KILLS_EPOCH:
            hook(point)

    run = prepare(place.case, place.slot, place.rank, place.address, None, until_the_last_epochs, skew_s=place.skew_s)
    usage = (place.folder / f"{place.slot}-{place.rank}-{place.life}.usage").open("w")
    with place.log() as log, usage:

        def on_step(run: Run) -> None:
            log(run.steps[-1])
            usage.write(json.dumps(dataclasses.asdict(Usage.of_this_process())) + "\n")
            until_the_last_epochs("after step")
            time.sleep(_PAUSE_S)

        run.train(on_step)
    return run.outcome()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_survivor_needs_no_more_files_threads_or_memory_after_many_kills(tmp_path: Path) -> None:
    """1,000 steps, and a kill after each 40 steps of the other replica, about every 10 s, at each point of a step."""
    case = Case(ranks=2, num_epochs=10, num_batches=100)
    kills = [
        Kill(1, life % 2, POINTS[life % len(POINTS)], step=_STEPS_OF_A_LIFE, life=life)
        for life in range(1000 // _STEPS_OF_A_LIFE)
    ]
    found = run_with_kills(case, kills, tmp_path, timeout_s=TIMEOUT_S, train=train_slowly)
    for mine, theirs in zip(*found, strict=True):
        assert_equal(mine, theirs)
    steps = members_by_step(logged_steps(tmp_path))
    assert [step[:2] for step in found[0][0]["steps"]] == sorted(steps), "a survivor ran each batch once"
    assert len(steps) == 1000
    assert_replayed(case, found[0][0]["weights"], steps)
    num_lives = len(list(tmp_path.glob("ready-1-0-*")))
    assert num_lives > 10
    for rank in range(case.ranks):
        usage = logged_usage(tmp_path, 0, rank)
        early, late = usage[150:300], usage[-150:]
        assert max(each.num_files for each in late) <= max(each.num_files for each in early)
        assert max(each.num_threads for each in late) <= max(each.num_threads for each in early)
        grown = max(each.resident_bytes for each in late) - max(each.resident_bytes for each in early)
        assert grown <= num_lives * 2**18, "not even a quarter of a MB for each life"


@dataclasses.dataclass(frozen=True)
class WideCase(Case):
    """A model of 100 MB, in one bucket."""

    def module(self) -> torch.nn.Module:
        torch.manual_seed(7)
        return torch.nn.Sequential(torch.nn.Linear(8, 5000), torch.nn.Linear(5000, 5000), torch.nn.Linear(5000, 4))


def train_with_torn_sums(place: Place, hook: Hook) -> Any:
    """In each step one replica drops its group, once, while the others are in the sum of 100 MB."""
    has_dropped = False

    def drop(point: str) -> None:
        nonlocal has_dropped
        hook(point)
        step = len(run.steps)
        if point == "before sum 2" and step % place.case.of == place.slot and not has_dropped:
            has_dropped = True
            time.sleep(0.005 * (step % 10))
            run.replicas.link._drop_group()  # type: ignore[attr-defined]

    run = prepare(place.case, place.slot, place.rank, place.address, None, drop, skew_s=place.skew_s)
    with place.log() as log:

        def on_step(run: Run) -> None:
            nonlocal has_dropped
            log(run.steps[-1])
            assert has_dropped == ((len(run.steps) - 1) % place.case.of == place.slot)
            has_dropped = False

        run.train(on_step)
    return run.outcome()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_group_is_dropped_while_others_send_100_mb_into_it(tmp_path: Path) -> None:
    """A hundred times: gloo could end a process. All processes live to the end, and no batch is lost."""
    case = WideCase(of=3, num_epochs=1, num_batches=100)
    found = run_with_kills(case, [], tmp_path, timeout_s=TIMEOUT_S, train=train_with_torn_sums)
    for other in found[1:]:
        assert_equal(found[0][0], other[0])
    assert not list(tmp_path.glob("ready-*-1")), "no process was started again"
    assert [len(steps) for steps in logged_steps(tmp_path)] == [100, 100, 100]
    assert set(members_by_step(logged_steps(tmp_path)).values()) == {(0, 1, 2)}


def train_and_keep_the_error(place: Place, hook: Hook) -> Any:
    try:
        return train_plainly(place, hook)
    except Exception as error:
        (place.folder / f"{place.slot}-{place.life}.error").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.long
def test_a_replica_that_was_stopped_longer_than_all_time_outs_ends_with_an_error_that_says_what_to_do(
    tmp_path: Path,
) -> None:
    """20 s by SIGSTOP; the others wait 5 s for its sum, and 14 s after a vote that said no."""
    case = Case(num_epochs=2, num_batches=8)
    kills = [Kill(1, 0, "before sum 0", step=3, stopped_s=20.0)]
    run_with_kills(case, kills, tmp_path, skew_s=5.0, train=train_and_keep_the_error)
    [error] = tmp_path.glob("*.error")
    assert error.name == "1-0.error"
    assert error.read_text().startswith(("ReplicaMismatchError: ", "CollectiveError: "))
    assert "tart it again" in error.read_text()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_wait_before_a_batch_for_one_that_is_stopped_for_less_than_skew_s(ranks: int, tmp_path: Path) -> None:
    """A byte of each is all that they wait for, however long it is silent."""
    case = Case(of=3, ranks=ranks, num_epochs=1, num_batches=6)
    kills = [Kill(1, ranks - 1, "before meeting", step=3, stopped_s=2 * HEARTBEAT_S)]
    found = run_with_kills(case, kills, tmp_path)
    for by_rank in found[1:]:
        for mine, theirs in zip(found[0], by_rank, strict=True):
            assert_equal(mine, theirs)
    assert not list(tmp_path.glob("ready-*-1")), "no process was started again"
    expected = [(0, number, (0, 1, 2), True) for number in range(6)]
    assert logged_steps(tmp_path) == [expected] * 3 * ranks
