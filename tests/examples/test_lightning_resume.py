"""The example: three scripts one after the other, on 2, 1 and 3 ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "lightning_resume.py"
STEPS = 15  # an epoch


def run_example(
    strategy: str, ranks: int, epochs: int, *, cwd: Path, out: str = "runs/resume"
) -> tuple[str, dict[int, tuple[str, float]]]:
    """The strategies and ranks, and by step the learning rate and the test loss; it must succeed without a warning."""
    options = ("--strategy", strategy, "--devices", ranks, "--epochs", epochs, "--out", out)
    title, *lines = run_script(SCRIPT, *options, cwd=cwd, ranks=ranks).printed.splitlines()
    rows = [re.fullmatch(r"  step +(\d+)  lr ([\d.]+)  test loss ([\d.]+)", line) for line in lines]
    return title, {int(row[1]): (row[2], float(row[3])) for row in rows if row}


def saved(folder: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(folder / "last.ckpt", weights_only=True)
    return checkpoint


@pytest.mark.long
def test_three_runs_on_other_processes_are_one_run(tmp_path: Path) -> None:
    """Each starts where the one before ended, and the end is that of a run under "ddp" that was never interrupted."""
    chain: dict[int, tuple[str, float]] = {}
    folder = tmp_path / "runs" / "resume"
    for strategy, devices, epochs in (("ddp", 2, 2), ("megatron_ddp", 1, 3), ("megatron_ddp", 3, 4)):
        before = max(chain, default=0)
        title, lines = run_example(strategy, devices, epochs, cwd=tmp_path)
        assert title == f"{'DDP' if strategy == 'ddp' else 'MegatronDDP'}Strategy on {devices} rank(s)"
        assert list(lines) == list(range(before, STEPS * epochs + 1, STEPS))
        if chain:
            assert lines[before] == chain[before], "the same loss from the same weights, and the same learning rate"
        chain |= lines
        checkpoint = saved(folder)
        assert (checkpoint["global_step"], checkpoint["epoch"]) == (STEPS * epochs, epochs - 1)
        steps = {values["step"].item() for values in checkpoint["optimizer_states"][0]["state"].values()}
        assert steps == {STEPS * epochs}
        assert {path.name for path in folder.iterdir()} == {"last.ckpt"}

    _, whole = run_example("ddp", 1, 4, out="whole", cwd=tmp_path)
    assert list(whole) == list(chain)
    assert [lr for lr, _ in whole.values()] == [lr for lr, _ in chain.values()]
    # on one, two and three ranks the gradients of the same images are summed in other orders
    assert [loss for _, loss in chain.values()] == pytest.approx([loss for _, loss in whole.values()], rel=1e-4)
    assert chain[4 * STEPS][1] < 0.3 < 2.2 < chain[0][1], "it learned: ln 10 is what guessing costs"
    for name, value in saved(tmp_path / "whole")["state_dict"].items():
        torch.testing.assert_close(saved(folder)["state_dict"][name], value, rtol=1e-3, atol=1e-4)
