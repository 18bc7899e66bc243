"""The benchmarks of rounded wires, as they are run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import rounding
from tests.support.patience import HANG_S

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> str:
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_format_is_timed_and_its_error_told() -> None:
    done = CliRunner().invoke(rounding.main, ["--numel", str(2**17)])
    assert done.exit_code == 0, done.output
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line]
    errors = {row[0].strip(): float(row[3]) for row in rows}
    assert list(errors) == ["bf16", "fp16", "int8", "fp8"]
    # Half a unit in the last place, over numbers anywhere between two powers of two: bf16 has eight bits, fp16 eleven.
    assert 2**-10 < errors["bf16"] < 2**-9
    assert errors["fp16"] < errors["bf16"] < errors["int8"] < errors["fp8"]


@pytest.mark.fresh
@pytest.mark.long
def test_losses_of_rounded_wires_are_compared_with_those_of_ddp(tmp_path: Path) -> None:
    told = run("benchmarks.loss_curves", "--steps", 3, "--seeds", 2, "--out", tmp_path)
    written = json.loads((tmp_path / "loss_curves.json").read_text())
    assert list(written) == ["ddp", "ddp, weights rounded to bf16 at the start", "16 bits", "8 bits"]
    assert (tmp_path / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    for seed in (0, 1):
        plain = written["ddp"][seed]["training"]
        for name, curves in written.items():
            losses = curves[seed]["training"]
            assert f"{name[:8]}" in told
            assert len(losses) == 3
            assert math.isclose(losses[0], plain[0], rel_tol=1e-3), "all begin with the same weights and windows"
            assert (losses == plain) == (name == "ddp"), "and then each goes its own way"
