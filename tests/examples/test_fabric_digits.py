"""The example on two ranks."""

from __future__ import annotations

import csv
from pathlib import Path

from ..support.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "fabric_digits.py"


def run_example(*arguments: str, cwd: Path) -> str:
    """Its standard output; it must succeed without a warning."""
    return run_script(SCRIPT, *arguments, cwd=cwd).printed


def losses(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file)]


def test_it_trains_as_under_ddp(tmp_path: Path) -> None:
    """To the bit, if nothing is clipped: the norm that clips is summed shard by shard, and by parameters under ddp."""
    ours, theirs = (
        run_example("--epochs", "1", "--clip", "0", "--strategy", strategy, cwd=tmp_path)
        for strategy in ("megatron_ddp", "ddp")
    )
    assert ours.replace("megatron_ddp", "ddp") == theirs
    run_dir = tmp_path / "runs" / "digits"
    assert len(losses(run_dir / "ddp")) == 12  # 23 batches a rank, two a step, the last alone
    assert losses(run_dir / "megatron_ddp") == losses(run_dir / "ddp")
