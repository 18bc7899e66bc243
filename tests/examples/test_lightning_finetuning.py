"""The example on one rank and on two."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from ..support.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "lightning_finetuning.py"
EPOCHS, FROZEN = 6, 3  # of fine-tuning; the backbone is frozen for the first half


class Run(NamedTuple):
    printed: str
    path: Path

    def epochs(self) -> list[tuple[float, float, int]]:
        """(percentage recognised, loss, number of parameters trained) of each epoch of fine-tuning."""
        lines = re.findall(
            r"^10 digits, epoch \d: ([\d.]+)% recognised, loss ([\d.]+), (\d) parameters trained$", self.printed, re.M
        )
        return [(float(accuracy), float(loss), int(num_trained)) for accuracy, loss, num_trained in lines]


Runs = Callable[[str, int], Run]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """(strategy, devices) -> what a script printed, which succeeded without a warning; each runs once."""

    @cache
    def run(strategy: str, devices: int) -> Run:
        path = tmp_path_factory.mktemp("finetuning")
        options = ("--strategy", strategy, "--devices", devices, "--epochs", EPOCHS)
        return Run(run_script(SCRIPT, *options, cwd=path, ranks=devices).printed, path)

    return run


@pytest.mark.long
def test_it_learns_to_read_digits_with_equal_weights_on_all_ranks(runs: Runs) -> None:
    run = runs("megatron_ddp", 2)
    epochs = run.epochs()
    assert [num_trained for _, _, num_trained in epochs] == [2] * FROZEN + [6] * (EPOCHS - FROZEN), "from one rank only"
    best = max(accuracy for accuracy, _, _ in epochs)
    assert best > 88, "guessing gives 10"
    assert f"megatron_ddp, 2 rank(s): {best}% of 360 images" in run.printed
    assert "weights of the ranks: equal\n" in run.printed


@pytest.mark.long
def test_two_ranks_learn_what_one_learns(runs: Runs) -> None:
    """The frozen half and the other; what remains of a difference is another order of sums."""
    two, one = runs("megatron_ddp", 2).epochs(), runs("ddp", 1).epochs()
    assert len(two) == EPOCHS
    assert [loss for _, loss, _ in two] == pytest.approx([loss for _, loss, _ in one], rel=1e-3)
    assert [accuracy for accuracy, _, _ in two] == pytest.approx([accuracy for accuracy, _, _ in one], abs=0.6)
