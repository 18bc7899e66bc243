"""The check of GPUs passes on the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check.ranks import FAKE_SIZE
from tests.support.timeouts import HANG_S

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )


@pytest.mark.nightly
@pytest.mark.parametrize("letters", ["A,B,E,G,I,J,L", "H,M,Q", "C", "D,F,T", "K,P", "N,R,S", "O"])
def test_gpu_check_passes_on_the_host(letters: str, tmp_path: Path) -> None:
    """``.ci/run`` has all of it in one run."""
    done = run("-m", "benchmarks.gpu_check", "--device", "cpu", "--only", letters, "--json", str(tmp_path / "json"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "json").read_text())["lines"]
    assert {line["name"][0] for line in lines} == set(letters.split(","))
    # One rank is not sharded, so that these also have the first of several.
    sharded = {line["name"][0] for line in lines if f"one-of-{FAKE_SIZE}" in line["name"]}
    assert sharded == set("BGJKMS") & set(letters.split(","))
    assert all(line["detail"] for line in lines if line["verdict"] == "SKIPPED")


@pytest.mark.nightly
def test_gpu_check_of_several_gpus_passes() -> None:
    done = run("-m", "benchmarks.gpu_check", "--device", "cpu", "--gpus", "3", "--only", "C,F,I,M,N,P,Q,R")
    assert done.returncode == 0, done.stdout + done.stderr
