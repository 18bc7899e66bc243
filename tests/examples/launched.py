"""An example as ``accelerate launch`` runs it with the files that lie beside it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from ..support.scripts import ROOT, Done, run_script
from ..support.timeouts import HANG_S

EXAMPLES = ROOT / "examples"
OURS = ("megastrategy.launch", "--config", str(EXAMPLES / "megatron_ddp.yaml"))
"""The module that stands before an unmodified script, and its arguments."""


def run_example(
    name: str, *arguments: str, cwd: Path, launcher: tuple[str, ...] = (), processes: int = 2, **variables: str
) -> str:
    """Its standard output on ranks that have accelerate's environment; it must succeed without a warning of ours or
    about us. ``variables``: more environment."""
    environment = {"ACCELERATE_USE_CPU": "true", **variables}
    done = run_script(EXAMPLES / name, *arguments, cwd=cwd, ranks=processes, environment=environment, before=launcher)
    return checked(done)


def launch_example(name: str, *arguments: str, cwd: Path, **variables: str) -> str:
    """The same by ``accelerate launch`` itself, with both files."""
    ours = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    ours |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    ours |= {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT), **variables}
    launch = ["accelerate.commands.launch", "--config_file", str(EXAMPLES / "accelerate.yaml"), "-m", *OURS]
    command = [sys.executable, "-m", *launch, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=cwd, env=ours, capture_output=True, text=True, timeout=HANG_S)
    return checked(Done(done.returncode, done.stdout, done.stderr))


def losses(folder: Path) -> list[float]:
    """The output of an example, by step."""
    with (folder / "losses.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def checked(done: Done) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "megastrategy" not in done.stderr, done.stderr
    return done.stdout
