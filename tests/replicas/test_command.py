"""``megastrategy replicas``, with the script of the page and the example, which kills one of its processes."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from megastrategy.tools.commands import root
from tests.support.patience import HANG_S

pytest.importorskip("torchft", reason="replicas need torchft: pip install 'megastrategy[replicas]'")
ROOT = Path(__file__).parents[2]
FAST = ("--heartbeat", "2", "--skew", "20", "--patience", "60")


def start(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megastrategy", "replicas", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HANG_S)


def start_here(*arguments: str | Path) -> Result:
    """Without an interpreter for the command itself."""
    return CliRunner().invoke(root, ["replicas", *map(str, arguments)])


def block(text: str) -> str:
    """The script of the page that contains this text."""
    page = (ROOT / "docs" / "replicas.md").read_text()
    [found] = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if text in each]
    return found


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("text", "ranks", "done"),
    [
        ("init_process_group", 1, "20 steps"),
        pytest.param("pl.Trainer(", 2, "20 steps", marks=pytest.mark.long),
        pytest.param("fabric.launch", 2, "2 epochs", marks=pytest.mark.long),
        pytest.param("Accelerator(", 2, "2 epochs", marks=pytest.mark.long),
    ],
    ids=("plain loop", "Lightning", "Fabric", "Accelerate"),
)
def test_a_script_of_the_page_trains_in_two_replicas(text: str, ranks: int, done: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block(text))
    ended = start("--of", "2", "--ranks", str(ranks), *FAST, "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # torchrun's processes write a line and its end separately, so that lines of two may run together
    said = re.findall(rf"replica (\d): {done}(?=\n|replica)", ended.stdout)
    assert sorted(said) == sorted([*"01"] * ranks), ended.stdout
    assert ended.stderr.startswith("time-outs: a replica that is silent for 2 s is taken for dead")


@pytest.mark.fresh
@pytest.mark.long
def test_the_example_kills_a_process_which_comes_back(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "replicas.py")
    done = start("--of", "2", "--ranks", "2", *FAST, script, "--kill", "1:30", "--epochs", "40", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replica 1 ended with exit code 1; it is started again" in done.stderr
    assert "replicas (0,)" in done.stdout
    last = re.findall(r"step (\d+): loss [\d.]+, replicas (\([\d, ]+\))", done.stdout)[-1]
    assert last == ("1160", "(0, 1)")
    one, other = ((tmp_path / "runs" / "replicas" / f"weights-{slot}").read_text() for slot in (0, 1))
    assert one == other
    command = [sys.executable, str(ROOT / "examples" / "replicas_picture.py"), "steps.png", "runs/replicas"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=HANG_S)
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.fresh
def test_a_script_that_always_fails_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    done = start_here("--of", "1", "--restarts", "1", *FAST, tmp_path / "train.py")
    assert done.exit_code == 1
    assert "no replica came to the end" in done.stderr.splitlines()[-1]
    assert done.stderr.count("it is started again") == 1


@pytest.mark.fresh
@pytest.mark.long
def test_a_script_that_fails_at_once_in_all_replicas_is_not_started_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    done = start("--of", "2", *FAST, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "and each failed 3 times at its start" in done.stderr.splitlines()[-1]
    assert 4 <= done.stderr.count("it is started again") <= 5


@pytest.mark.fresh
@pytest.mark.long
def test_one_that_fails_beside_another_does_not_end_the_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, pathlib, sys, time\n"
        "fails = pathlib.Path(f'failed-{os.getpid()}')\n"
        "if os.environ['REPLICA_GROUP_ID'] == '1': fails.touch(); sys.exit(3)\n"
        "while len(list(pathlib.Path().glob('failed-*'))) < 5: time.sleep(0.1)\n"
    )
    done = start("--of", "2", *FAST, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "another one has come to the end, so it is not started again" in done.stderr
    assert "ended without a meeting of replicas: each trained by itself" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
@pytest.mark.fresh
def test_a_signal_ends_all_processes_with_one_line(signum: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time\npathlib.Path(f'pid-{os.getpid()}').touch()\ntime.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "megastrategy", "replicas", "--of", "2", "--ranks", "2", *FAST, "train.py"]
    # A process that a shell started in the background ignores Ctrl-C, and so do its children.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heeds) as process:
        deadline = time.monotonic() + HANG_S
        while len(list(tmp_path.glob("pid-*"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signum)
        _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert said.splitlines()[-1] == "Error: train.py was interrupted"
    assert "Traceback" not in said
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_wrong_time_outs_are_reported_by_their_options(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = start_here("--skew", "1", tmp_path / "train.py")
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: --skew=1: expected at least 5 seconds, the time of heartbeat")
