"""Long trainings of processes: resources after many kills, large sums that end in the middle, a stopped replica."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.replica_processes import POINTS, Kill, Place, logged_steps, run_with_kills
from tests.support.replicas import Case, Hook, Run, assert_equal, assert_replayed, members_by_step, prepare

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
