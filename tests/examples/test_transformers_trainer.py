"""The example under torch DDP, and with our launcher before it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ..support.comparison import assert_equal
from .launched import OURS, run_example

SCRIPT = "transformers_trainer.py"
OF_A_CLOCK = ("runtime", "samples_per_second", "steps_per_second")


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged values, without times."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{key: value for key, value in entry.items() if not key.endswith(OF_A_CLOCK)} for entry in entries]


def told_right(printed: str) -> float:
    """Percent of the lines that were not trained on, by the best model."""
    [percent] = re.findall(r"([\d.]+)% of 640 lines told right by the best of 3 epochs", printed)
    return float(percent)


@pytest.mark.long
def test_it_learns_as_under_torch_ddp_and_resumes(tmp_path: Path) -> None:
    options = ("--clip", "0", "--epochs", "3")
    theirs = run_example(SCRIPT, *options, "--out", "theirs", cwd=tmp_path)
    ours = run_example(SCRIPT, *options, "--out", "ours", cwd=tmp_path, launcher=OURS)
    assert told_right(ours) == told_right(theirs)
    assert told_right(ours) > 50, "guessing gives 12.5"
    logged, expected = history(tmp_path / "ours"), history(tmp_path / "theirs")
    assert len([entry for entry in logged if "eval_accuracy" in entry]) == 4, "every epoch, and the best"
    for entries in (logged, expected):
        for entry in entries:
            entry.pop("grad_norm", None)  # summed shard by shard, and by parameters there
    assert_equal(logged, expected)
    first, second = (load_file(tmp_path / out / "model.safetensors") for out in ("ours", "theirs"))
    assert_equal(first, second)
    # what is not in a file of torch DDP's is not in ours
    names = [sorted(path.name for path in (tmp_path / out / "checkpoint-120").iterdir()) for out in ("ours", "theirs")]
    assert names[0] == names[1]
    state = torch.load(tmp_path / "ours" / "checkpoint-120" / "optimizer.pt", weights_only=True)["state"]
    assert sum(entry["exp_avg"].numel() for entry in state.values()) == sum(value.numel() for value in first.values())

    resume = ("--epochs", "3", "--batch-size", "32", "--resume", "ours/checkpoint-80", "--out", "resumed")
    resumed = run_example(SCRIPT, *resume, cwd=tmp_path, launcher=OURS, processes=1)
    steps = [entry["step"] for entry in history(tmp_path / "resumed") if "loss" in entry]
    assert steps == [40, 80, 120]
    assert not (tmp_path / "resumed" / "checkpoint-80").exists(), "trained was only the epoch that was left"
    assert told_right(resumed) > 50
