"""The sbatch files of ``examples/slurm`` start two ranks that find each other. ``srun`` here is a double: it starts the
command once for each node on this machine, with Slurm's variables; ``campaigns.slurm`` has the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.scripts import ROOT, outside_of_ranks
from tests.support.timeouts import HANG_S

FOLDER = ROOT / "examples" / "slurm"

SRUN = """#!/bin/bash
for node in 0 1; do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_STEP_NODELIST=127.0.0.1 "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit ${failed:-0}
"""

SCONTROL = """#!/bin/sh
echo 127.0.0.1
"""


def submitted(name: str, folder: Path) -> str:
    """The output of a job of the file."""
    for command, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = folder / "bin" / command
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    ours = outside_of_ranks()
    ours |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable}
    ours |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": name, "SLURM_JOB_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}
    ours |= {"SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1"}
    ours |= {"OUT": str(folder / "out"), "EPOCHS": "1", "MASTER_PORT": str(free_port())}
    command = ["bash", str(FOLDER / f"{name}.sbatch")]
    done = subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def options(name: str) -> set[str]:
    lines = (FOLDER / f"{name}.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    return {line.split()[1] for line in lines if line.startswith("#SBATCH")}


def test_what_they_ask_slurm_for() -> None:
    common = {"--nodes=2", "--ntasks-per-node=1", "--time=01:00:00", "--requeue", "--output=runs/slurm-%j.out"}
    assert options("trainer") == common | {"--job-name=trainer", "--signal=USR1@90", "--open-mode=append"}
    assert options("accelerate") == common | {"--job-name=accelerate"}


@pytest.mark.nightly
def test_a_trainer_trains_on_two_nodes(tmp_path: Path) -> None:
    said = submitted("trainer", tmp_path)
    assert "MegatronDDPStrategy on 2 rank(s)" in said
    assert "step 15" in said
    assert (tmp_path / "out" / "last.ckpt").is_file()


@pytest.mark.nightly
def test_an_unmodified_script_trains_on_two_nodes(tmp_path: Path) -> None:
    said = submitted("accelerate", tmp_path)
    assert f"{tmp_path / 'out'}, 2 process(es)" in said
    assert any((tmp_path / "out").glob("checkpoint-*")), said
