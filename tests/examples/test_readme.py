"""The README's code runs, its links lead somewhere, and its options are those that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from megastrategy.core import field_names

from ..support.patience import HANG_S

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(command: list[str], cwd: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    done = subprocess.run(
        command, cwd=cwd, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_lightning_block(tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(next(block for block in BLOCKS if "pl.Trainer" in block))
    printed = run([sys.executable, "block.py"], tmp_path)
    assert printed.count("megatron_ddp on 2 rank(s)") == 2, "two fits, printed by rank 0 alone"


def test_the_plain_loop(tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(next(block for block in BLOCKS if "init_process_group" in block))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "state of 4 parameters" in run([*launcher, "block.py"], tmp_path)


def test_no_block_is_left_out() -> None:
    assert len(BLOCKS) == 2


def test_the_table_of_options_is_complete() -> None:
    section = README.split("## Options")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(field_names())
