"""kill -9 from outside: survivors are never started again, pause for a heartbeat, and all end with equal weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.replicas.scripts.sizes import NUM_SAMPLES
from tests.support.replica_jobs import HEARTBEAT_S, Job, check_ends, check_survivor, longest_pause

EPOCHS = 30
MOST_S = HEARTBEAT_S + 1.0
BUSY_S = 4.0
"""Added for machines on which a step alone may take so long: tests share two cores with others."""


def check_survivors(job: Job, *slots: int) -> None:
    for slot in slots:
        check_survivor(job, slot, EPOCHS)
        for rank in range(job.ranks):
            (lines,) = job.journals(slot, rank).values()
            assert longest_pause(lines) < MOST_S + BUSY_S


@pytest.mark.nightly
@pytest.mark.parametrize(("of", "ranks", "seed"), [(2, 2, 1), (3, 1, 2)])
def test_survivors_go_on_and_the_killed_one_comes_back(tmp_path: Path, of: int, ranks: int, seed: int) -> None:
    draw = random.Random(seed)
    slot = draw.randrange(of)  # 0 is the leader at first
    job = Job.start("loop.py", tmp_path, EPOCHS, 0.05, of=of, ranks=ranks)
    try:
        for _ in range(2):
            job.wait_until_together(draw.randint(3, 8))
            job.kill(slot, draw.randrange(ranks))
        check_ends(job, EPOCHS)
    finally:
        job.stop()
    check_survivors(job, *(set(range(of)) - {slot}))


@pytest.mark.nightly
def test_all_ranks_and_those_that_come_back_are_killed(tmp_path: Path) -> None:
    job = Job.start("loop.py", tmp_path, EPOCHS, 0.1, ranks=2)
    try:
        job.wait_until_together(3)
        job.kill(1, 0, 1)
        job.kill(1, 1)  # as soon as it has a journal, which is before its first batch: it meets the other
        check_ends(job, EPOCHS)
    finally:
        job.stop()
    check_survivors(job, 0)


@pytest.mark.nightly
def test_stop_ends_all_after_one_batch(tmp_path: Path) -> None:
    job = Job.start("loop.py", tmp_path, EPOCHS, 0.0, 7, ranks=2)
    ends = job.wait_for_end()
    assert len({(end["weights"], end["steps"], end["place"]) for end in ends}) == 1
    assert ends[0]["steps"] in (8, 9)


@pytest.mark.nightly
def test_trainer_returns_with_loops_and_its_place(tmp_path: Path) -> None:
    epochs = 12
    job = Job.start("trainer.py", tmp_path, epochs, 0.1)
    try:
        job.wait_until_together(3)
        job.kill(0)
        check_ends(job, epochs)
    finally:
        job.stop()
    first, second = job.wait_for_end()
    assert first == second
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == sorted(
        f"epoch={epoch}.ckpt" for epoch in range(epochs)
    )
    # After it has come back, an epoch has each sample once, over both replicas.
    lines = [line for slot in (0, 1) for process in job.journals(slot).values() for line in process]
    last = [number for line in lines if line["epoch"] == epochs - 1 for number in line["numbers"]]
    assert sorted(last) == list(range(NUM_SAMPLES))


@pytest.mark.nightly
@pytest.mark.parametrize(("script", "num_microbatches"), [("fabric.py", 1), ("accelerator.py", 2)])
def test_loops_of_frameworks_come_back(tmp_path: Path, script: str, num_microbatches: int) -> None:
    epochs = 8
    job = Job.start(script, tmp_path, epochs, 0.1)
    try:
        if script == "fabric.py":  # the other one ends itself
            job.wait_until_together(3)
            job.kill(1)
        check_ends(job, epochs, num_microbatches)
    finally:
        job.stop()
    first, second = job.wait_for_end()
    assert first == second
    last = [
        number
        for slot in (0, 1)
        for process in job.journals(slot).values()
        for line in process
        if line["epoch"] == epochs - 1 and not line["dropped"]
        for number in line["numbers"]
    ]
    assert sorted(last) == list(range(NUM_SAMPLES))
