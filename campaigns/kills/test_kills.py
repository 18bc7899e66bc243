"""Ranks are killed at any moment, and nothing is lost but the step that was under way."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megastrategy._checkpoints.directories import read_remote_extra
from megastrategy.core import EXTRA_FILE, OpenDirectory, RemoteDirectory, is_directory_checkpoint
from tests.doors.rank_processes import run_python
from tests.support.object_store import PROTOCOL

from . import script
from .runs import (
    SIZE,
    Kill,
    Outcome,
    draw_kills,
    finish,
    recorded,
    run_and_kill,
    store_of,
    with_directories,
    with_loop,
    with_s3,
    with_store,
    with_store_in_background,
    with_trainer,
)

Job = Callable[[Path, int], dict[str, Tensor]]

LIMIT_S = 60.0
"""For one start, whose steps take hundredths of a second."""

MAX_LOST = {with_trainer: 0, with_directories: 0, with_loop: 2}
MAX_LOST |= {with_store: 0, with_s3: 0, with_store_in_background: 2}
"""How many steps before the last one that any rank has begun may have to be done again: the Trainer saves after each
and waits for the file, unless it saves in the background; the loop saves after every second one and does not wait."""

PROTOCOLS = {with_store: PROTOCOL, with_store_in_background: PROTOCOL, with_s3: "s3"}
"""Of the jobs that save into a store."""

REASONS = (
    "Most often another rank ended with an error, was killed",
    "Connection closed by peer",
    "reset by peer",
    "have ended",
)


def losses_of(folder: Path, num_steps: int) -> list[dict[int, float]]:
    """By rank, the losses of an undisturbed run."""
    losses = [dict(recorded(folder, rank)) for rank in range(SIZE)]
    assert all(list(found) == list(range(num_steps)) for found in losses)
    return losses


def assert_all_files_are_whole(folder: Path) -> None:
    """Every byte is read, and its checksum compared."""
    for path in folder.glob("*.ckpt"):
        if path.is_dir():
            assert OpenDirectory(path).read("model")
            assert OpenDirectory(path).read("optimizer_0")
            assert torch.load(path / EXTRA_FILE, weights_only=True)
        else:
            torch.load(path, weights_only=True)


def assert_all_in_store_are_whole(url: str) -> None:
    """Interrupted ones, whose names are visible, are not checkpoints."""
    store = RemoteDirectory(url)
    names = store.file_system().ls(url, detail=False) if store.is_dir() else []
    for place in (RemoteDirectory(store.object(name.rsplit("/", 1)[-1])) for name in names):
        if is_directory_checkpoint(place):
            assert OpenDirectory(place).read("model")
            assert OpenDirectory(place).read("optimizer_0")
            assert read_remote_extra(place, True)


def assert_survivor_said_why(kill: Kill, outcome: Outcome) -> None:
    if len(kill.ranks) < SIZE:
        assert outcome.survivor is not None, "it ended without an error"
        assert any(reason in outcome.survivor for reason in REASONS), outcome.survivor
        assert outcome.survivor_s < 30


def train_under_fire(job: Job, folder: Path, seed: int, count: int) -> None:
    """One training that is killed ``count`` times and resumes by itself, beside an undisturbed one."""
    calm, fire = folder / "calm", folder / "fire"
    tally: Counter[str] = Counter()
    last_begun = -1
    for number, kill in enumerate(draw_kills(seed, count)):
        before = [len(recorded(fire, rank)) for rank in range(SIZE)]
        outcome = run_and_kill(job, fire, kill, LIMIT_S)
        print(f"seed {seed}, kill {number}: {kill} -> {outcome}")  # noqa: T201 - shown when it fails
        tally["while it saved" if outcome.writing else "elsewhere"] += 1
        if job in PROTOCOLS:
            assert_all_in_store_are_whole(store_of(fire, PROTOCOLS[job]))
        else:
            assert_all_files_are_whole(fire / "checkpoints")
        assert_survivor_said_why(kill, outcome)
        for rank in range(SIZE):
            steps = [step for step, _ in recorded(fire, rank)[before[rank] :]]
            assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
            assert not steps or last_begun - MAX_LOST[job] <= steps[0] <= last_begun + 1, "it resumed from elsewhere"
        last_begun = max([last_begun, *(step for rank in range(SIZE) for step, _ in recorded(fire, rank))])
    num_steps = last_begun + 6
    limit_s = LIMIT_S * (1 + num_steps / 80)
    finish(job, fire, num_steps, limit_s)
    taken_s = finish(job, calm, num_steps, limit_s)
    expected = losses_of(calm, num_steps)
    print(f"seed {seed}: {count} kills, {dict(tally)}; {num_steps} steps, undisturbed {taken_s:.1f} s")  # noqa: T201
    for rank in range(SIZE):
        done = recorded(fire, rank)
        assert {step for step, _ in done} == set(range(num_steps))
        assert [(step, loss) for step, loss in done if loss != expected[rank][step]] == []
    assert_same_weights(fire, calm)
    assert not list((fire / "checkpoints").glob(".*")), "what was cut off is overwritten when it is saved again"


def assert_same_weights(folder: Path, expected: Path) -> None:
    ours, theirs = (torch.load(path / "weights.pt") for path in (folder, expected))
    assert list(ours) == list(theirs)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.nightly
@pytest.mark.parametrize("job", [with_trainer, with_directories, with_store, with_store_in_background, with_loop])
def test_killed_training_ends_as_if_not_killed(job: Job, tmp_path: Path) -> None:
    """Losses of all steps and the last weights to the bit; the rank that is left says why it ends."""
    train_under_fire(job, tmp_path, seed=0, count=50)


@pytest.mark.nightly
def test_torchrun_restarts_and_resumes_by_itself(tmp_path: Path) -> None:
    """A rank dies within a step, then one within a save; ``ckpt_path="last"`` finds the last whole file each time."""
    calm, fire = tmp_path / "calm", tmp_path / "fire"
    fire.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    # otherwise torchrun's restarts share one store, and may find addresses of processes that are dead: pytorch #167288
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run_python(*command, "-m", script.__name__, str(fire), cwd=tmp_path, environment=environment)
    finish(with_trainer, calm, script.NUM_STEPS, LIMIT_S)
    for rank in range(SIZE):
        # step 3 was never begun, and what was saved after step 6 never got its name
        assert (fire / f"starts_{rank}").read_text() == "0 0\n1 3\n2 6\n"
        expected = losses_of(calm, script.NUM_STEPS)[rank]
        assert [(step, loss) for step, loss in recorded(fire, rank) if loss != expected[step]] == []
        assert {step for step, _ in recorded(fire, rank)} == set(expected)
    assert_same_weights(fire, calm)
    assert sorted(os.listdir(fire / "checkpoints")) == ["last.ckpt", f"step={script.NUM_STEPS}.ckpt"]
