"""The tutorial's commands run in the order of the page, and print what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.patience import HANG_S
from ..support.scripts import outside_of_ranks, run_script
from . import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    return [shlex.split(block) for block in re.findall(r"```bash\n(.*?)\n```", PAGE)]


def texts() -> list[str]:
    return re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


def write_script(folder: Path) -> Path:
    """The page's one block of Python."""
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = folder / "train.py"
    path.write_text(block)
    return path


def run_tool(command: list[str], folder: Path) -> str:
    """``megastrategy ...`` in an interpreter of its own, as the page starts it."""
    assert command[0] == "megastrategy"
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=outside_of_ranks() | {"PYTHONIOENCODING": "utf-8", "COLUMNS": "160"},
        capture_output=True,
        encoding="utf-8",
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_and_resuming_print_what_the_page_shows(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    under_ddp, ours, resumed = (command[2:] for command in commands() if command[:2] == ["python", "train.py"])
    first, equal, setup, after = texts()
    assert first == equal, "losses of both strategies"
    assert run_script(script, *under_ddp, cwd=tmp_path).printed == first
    done = run_script(script, *ours, cwd=tmp_path)
    assert done.printed == equal
    assert setup in done.stderr
    assert (tmp_path / "megatron_ddp.ckpt").exists()
    assert run_script(script, *resumed, cwd=tmp_path).printed == after


@pytest.mark.fresh
@pytest.mark.long
def test_the_plan_is_the_one_on_the_page(tmp_path: Path) -> None:
    write_script(tmp_path)
    [plan] = (command for command in commands() if command[:2] == ["megastrategy", "plan"])
    printed = [re.split(r"\s*│\s*", line)[1:-1] for line in run_tool(plan, tmp_path).splitlines() if "│" in line]
    ranks, weights, frozen, gradients, main_params, optimizer, exchange, activations, total, answer = zip(
        *printed, strict=True
    )
    assert set(frozen + main_params + exchange) == {"0 B"}
    shown = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    expected = zip(ranks, weights, gradients, optimizer, activations, total, answer, strict=True)
    assert shown == [list(row) for row in expected]


@pytest.mark.long
@pytest.mark.fresh
def test_the_profile_leaves_its_picture(tmp_path: Path) -> None:
    write_script(tmp_path)
    [profile] = (command for command in commands() if command[:2] == ["megastrategy", "profile"])
    assert "wait" in run_tool(profile, tmp_path)
    assert (tmp_path / "profile" / "timeline.png").read_bytes().startswith(b"\x89PNG")
