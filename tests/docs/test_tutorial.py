"""The tutorial's commands run in the order of the page, and print what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.scripts import run_script
from ..support.timeouts import HANG_S
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


def test_tutorial_prints_what_the_page_shows(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    under_ddp, ours, resumed = (command[2:] for command in commands() if command[:2] == ["python", "train.py"])
    first, equal, setup, after, _ = texts()
    assert first == equal, "losses of both strategies"
    assert run_script(script, *under_ddp, cwd=tmp_path).printed == first
    done = run_script(script, *ours, cwd=tmp_path)
    assert done.printed == equal
    assert setup in done.stderr
    assert (tmp_path / "megatron_ddp.ckpt").exists()
    assert run_script(script, *resumed, cwd=tmp_path).printed == after


@pytest.mark.nightly
def test_tutorial_plans_what_the_page_shows(tmp_path: Path) -> None:
    write_script(tmp_path)
    [plan] = (command for command in commands() if command[:2] == ["megastrategy", "plan"])
    command = [sys.executable, "-m", *plan]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    assert texts()[-1] in printed
