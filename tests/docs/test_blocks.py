"""The code that pages show runs, and prints what they say it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..support.scripts import run_script
from ..support.timeouts import HANG_S
from . import ROOT


def blocks(page: Path) -> list[str]:
    return [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def blocks_that_print(page: Path) -> list[tuple[str, str]]:
    """Each block, and the text that follows it."""
    printing = r"```python\n((?:(?!```).)*)```\n\nprints[^\n]*\n\n```text\n(.*?)```"
    return re.findall(printing, page.read_text(), re.DOTALL)


def run(command: list[str], cwd: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    done = subprocess.run(
        command, cwd=cwd, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


LAUNCHERS = {
    "../README.md": [],
    "lightning.md": [],
    "plain_loop.md": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "experts.md": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "tensor_parallel.md": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "pipelines.md": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
PRINTED = {
    "../README.md": (re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0], 1),
    "lightning.md": ("megatron_ddp on 2 rank(s)", 2),  # two fits, printed by rank 0 alone
    "plain_loop.md": ("state of 4 parameters", 1),
    "experts.md": ("2 of 4 experts on this rank, state of 7 parameters", 1),
    "tensor_parallel.md": ("state of 4 parameters", 1),
    "pipelines.md": ("state of 6 parameters", 1),
}


def script(page: str, folder: Path) -> Path:
    """The page's first block, of most pages the only one."""
    block, *_ = blocks(ROOT / "docs" / page)
    path = folder / "block.py"
    path.write_text(block)
    return path


@pytest.mark.parametrize("page", LAUNCHERS)
def test_block_of_a_page_runs(tmp_path: Path, page: str) -> None:
    text, times = PRINTED[page]
    done = run_script(script(page, tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(text) == times


@pytest.mark.parametrize(
    "page", [page if page == "plain_loop.md" else pytest.param(page, marks=pytest.mark.nightly) for page in LAUNCHERS]
)
def test_block_of_a_page_runs_as_the_page_says(tmp_path: Path, page: str) -> None:
    text, times = PRINTED[page]
    assert run([sys.executable, *LAUNCHERS[page], script(page, tmp_path).name], tmp_path).count(text) == times


@pytest.mark.parametrize(
    ("page", "number", "ranks"),
    [
        ("gradients.md", 0, 2),
        ("gradients.md", 1, 2),
        ("gradients.md", 2, 2),
        ("failures.md", 0, 2),
        ("failures.md", 1, 2),
        ("reference/options.md", 0, 1),
        ("design/one_gradient.md", 0, 2),
        ("design/less_memory.md", 0, 2),
        ("fabric.md", 0, 2),
        ("accelerate.md", 0, 2),
        ("accelerate.md", 1, 1),
        ("data.md", 0, 2),
        ("data.md", 1, 2),
        ("experts.md", 0, 2),
        ("experts.md", 1, 2),
        ("experts.md", 2, 2),
    ],
    ids=[
        "reading gradients",
        "by tokens",
        "not finite",
        "fitting again",
        "a backward left out",
        "options refused",
        "events",
        "on the host",
        "Fabric",
        "Accelerate",
        "a block of ours",
        "data",
        "stopped",
        "experts in Lightning",
        "experts in Fabric",
        "experts in Accelerate",
    ],
)
def test_blocks_print_what_the_page_says(tmp_path: Path, page: str, number: int, ranks: int) -> None:
    """A Trainer's own lines, which come before, are not on the page."""
    block, text = blocks_that_print(ROOT / "docs" / page)[number]
    (tmp_path / "block.py").write_text(block)
    if page == "experts.md":  # the file that its last three blocks share
        (tmp_path / "moe.py").write_text(blocks(ROOT / "docs" / page)[1])
    done = run_script(tmp_path / "block.py", cwd=tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    assert printed == text or ("pl.Trainer" in block and printed.endswith("\n" + text))
