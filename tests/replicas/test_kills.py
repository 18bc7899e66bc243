"""kill -9 from outside: survivors are never started again, pause for a heartbeat, and all end with equal weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from campaigns.replica_kills.__main__ import run
from tests.replicas.scripts.sizes import NUM_SAMPLES
from tests.support.replica_jobs import Job, check_ends

EPOCHS = 8


@pytest.mark.nightly
@pytest.mark.parametrize(("of", "ranks", "seed"), [(2, 2, 11), (3, 1, 2)], ids=["all-ranks-and-back", "two-of-three"])
def test_survivors_go_on_and_the_killed_one_comes_back(tmp_path: Path, of: int, ranks: int, seed: int) -> None:
    """Replica 0, which is the leader at first, is among the killed ones."""
    run(seed, of, ranks, "loop.py", tmp_path)


@pytest.mark.nightly
def test_stop_ends_all_after_one_batch(tmp_path: Path) -> None:
    job = Job.start("loop.py", tmp_path, EPOCHS, 0.0, 7, ranks=2)
    ends = job.wait_for_end()
    assert len({(end["weights"], end["steps"], end["place"]) for end in ends}) == 1
    assert ends[0]["steps"] in (8, 9)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "files", "num_microbatches"),
    [("trainer.py", "checkpoints/*", 1), ("fabric.py", "epoch=*", 1), ("accelerator.py", "state-*", 2)],
)
def test_frameworks_return_with_loops_and_place(tmp_path: Path, script: str, files: str, num_microbatches: int) -> None:
    job = Job.start(script, tmp_path, EPOCHS, 0.1)
    try:
        if script != "accelerator.py":  # where one ends itself
            job.wait_until_together(3)
            job.kill(0)
        check_ends(job, EPOCHS, num_microbatches)
    finally:
        job.stop()
    first, second = job.wait_for_end()
    assert first == second
    assert len(list(tmp_path.glob(files))) == EPOCHS
    # After it has come back, an epoch has each sample once, over both replicas.
    lines = [line for slot in (0, 1) for process in job.journals(slot).values() for line in process]
    last = [line["numbers"] for line in lines if line["epoch"] == EPOCHS - 1 and not line["dropped"]]
    assert sorted(itertools.chain.from_iterable(last)) == list(range(NUM_SAMPLES))
