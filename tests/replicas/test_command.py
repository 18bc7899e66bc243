"""``megastrategy replicas``, with the script of the page and the example, which kills one of its processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

pytest.importorskip("torchft", reason="replicas need torchft: pip install 'megastrategy[replicas]'")
ROOT = Path(__file__).parents[2]
FAST = ("--heartbeat", "2", "--skew", "20", "--patience", "60")


def start(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megastrategy", "replicas", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.fresh
def test_the_script_of_the_page_trains_in_two_replicas(tmp_path: Path) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "replicas.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(block)
    done = start("--of", "2", *FAST, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"replica \d: \d+ steps", done.stdout)) == ["replica 0: 20 steps", "replica 1: 20 steps"]
    assert done.stderr.startswith("time-outs: a replica that is silent for 2 s is taken for dead")


@pytest.mark.fresh
@pytest.mark.long
def test_the_example_kills_a_process_which_comes_back(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "replicas.py")
    done = start("--of", "2", "--ranks", "2", *FAST, script, "--kill", "1:30", "--epochs", "40", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replica 1 ended with exit code 1; it is started again" in done.stderr
    assert "replicas (0,)" in done.stdout
    last = re.findall(r"step (\d+): .* replicas (\(.*\))", done.stdout)[-1]
    assert last == ("1160", "(0, 1)")
    one, other = ((tmp_path / "runs" / "replicas" / f"weights-{slot}").read_text() for slot in (0, 1))
    assert one == other
    command = [sys.executable, str(ROOT / "examples" / "replicas_picture.py"), "steps.png", "runs/replicas"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=HANG_S)
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.fresh
def test_a_script_that_always_fails_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    done = start("--of", "1", "--restarts", "1", *FAST, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "no replica came to the end" in done.stderr.splitlines()[-1]
    assert done.stderr.count("it is started again") == 1
