"""An example as a user runs it, by ``accelerate launch`` with the files that lie beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
OURS = ("-m", "megastrategy.launch", "--config", str(EXAMPLES / "megatron_ddp.yaml"))
"""What stands before an unmodified script."""


def run_example(
    name: str, *arguments: str, cwd: Path, launcher: tuple[str, ...] = (), processes: int = 2, **variables: str
) -> str:
    """Its standard output; it must succeed without a warning of ours or about us. ``variables``: more environment."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    environment |= {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(EXAMPLES.parent), **variables}
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", str(EXAMPLES / "accelerate.yaml")] if processes == 2 else ["--num_processes", "1"]
    done = subprocess.run(
        [*launch, *launcher, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "megastrategy" not in done.stderr, done.stderr
    return done.stdout
