"""The example on two ranks."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import torch

from ..support.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "fabric_digits.py"


def run_example(*arguments: str, cwd: Path) -> str:
    """Its standard output; it must succeed without a warning."""
    return run_script(SCRIPT, *arguments, cwd=cwd).printed


def losses(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file)]


def test_it_learns_to_read_digits(tmp_path: Path) -> None:
    printed = run_example("--epochs", "5", cwd=tmp_path)
    run_dir = tmp_path / "runs" / "digits" / "megatron_ddp"
    assert {path.name for path in run_dir.iterdir()} == {"metrics.csv", "best.ckpt"}
    scores = [float(score) for score in re.findall(r"epoch \d: ([\d.]+)% of 360 images", printed)]
    assert len(scores) == 5, "from one rank only"
    assert max(scores) > 90, "guessing gives 10"
    epoch = scores.index(max(scores)) + 1
    assert f"megatron_ddp, 2 rank(s): {max(scores)}% after epoch {epoch}" in printed, "the best weights were loaded"
    checkpoint = torch.load(run_dir / "best.ckpt", weights_only=True)
    assert checkpoint["epoch"] == epoch
    assert checkpoint["optimizer"]["state"][0]["exp_avg"].shape == checkpoint["model"]["0.weight"].shape


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
