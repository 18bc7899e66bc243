"""The example as a user runs it, by ``accelerate launch``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

SCRIPT = Path(__file__).parents[2] / "examples" / "accelerate_text.py"


def run_example(*arguments: str, cwd: Path, processes: int = 2) -> str:
    """Its standard output; it must succeed without a warning of ours or about us."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    environment |= {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(SCRIPT.parents[1])}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    launch += ["--multi_gpu", "--num_processes", str(processes)] if processes > 1 else ["--num_processes", "1"]
    done = subprocess.run(
        [*launch, str(SCRIPT), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "megastrategy" not in done.stderr, done.stderr
    return done.stdout


def epochs(printed: str) -> list[tuple[str, str]]:
    """(loss, accuracy) of each, as printed."""
    return re.findall(r"epoch \d+: loss ([\d.]+), ([\d.]+)% of 500 lines", printed)


@pytest.mark.timeout(240)  # two scripts of two processes each, and one of one
def test_it_learns_as_under_torch_ddp_and_resumes(tmp_path: Path) -> None:
    """To the bit, if nothing is clipped: the norm that clips is summed shard by shard, and by parameters there."""
    ours = run_example("--clip", "0", "--epochs", "3", cwd=tmp_path)
    theirs = run_example("--clip", "0", "--epochs", "3", "--engine", "accelerate", cwd=tmp_path)
    assert epochs(ours) == epochs(theirs)
    assert len(epochs(ours)) == 3
    assert float(epochs(ours)[-1][1]) > 85, "guessing gives 50"
    folders = [tmp_path / "runs" / "text" / engine for engine in ("megatron_ddp", "accelerate")]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert sorted(first) == ["embed.weight", "head.bias", "head.weight", "windows.bias", "windows.weight"]
    assert all((first[name] == second[name]).all() for name in second)
    resumed = run_example("--epochs", "4", "--resume", "runs/text/megatron_ddp/last", cwd=tmp_path, processes=1)
    assert re.findall(r"epoch (\d)", resumed) == ["4"], "the one that was left"
    assert float(epochs(resumed)[-1][1]) > 85
