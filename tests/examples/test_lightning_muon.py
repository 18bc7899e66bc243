"""The example on two ranks, and on three."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "lightning_muon.py"
EPOCHS = 4
MATRIX_NUMEL, NUM_MATRICES = 64 * 64, 4


def run_example(strategy: str, ranks: int, cwd: Path) -> tuple[list[tuple[str, str]], int]:
    """(percentage recognised, loss) of each epoch, and the numbers of Muon's momentum on rank 0; it must succeed
    without a warning."""
    options = ("--strategy", strategy, "--devices", ranks, "--epochs", EPOCHS)
    printed = run_script(SCRIPT, *options, cwd=cwd, ranks=ranks).printed
    epochs = re.findall(r"^epoch \d: ([\d.]+)% recognised, loss ([\d.]+)$", printed, re.MULTILINE)
    assert len(epochs) == EPOCHS, "from one rank only"
    kept = re.search(rf"^{strategy}, {ranks} rank\(s\): rank 0 keeps ([\d,]+) of 16,384 numbers", printed, re.MULTILINE)
    assert kept is not None, printed
    return epochs, int(kept[1].replace(",", ""))


@pytest.mark.long
def test_it_learns_what_ddp_learns_with_half_of_the_matrices_on_each_rank(tmp_path: Path) -> None:
    """To every digit that is printed."""
    ours, num_kept = run_example("megatron_ddp", 2, tmp_path)
    theirs, num_theirs = run_example("ddp", 2, tmp_path)
    assert ours == theirs
    assert float(ours[-1][0]) > 90, "guessing gives 10"
    assert (num_kept, num_theirs) == (MATRIX_NUMEL * NUM_MATRICES // 2, MATRIX_NUMEL * NUM_MATRICES)
