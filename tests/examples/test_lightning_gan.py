"""The example on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.scripts import Done, run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "lightning_gan.py"
EPOCHS = 5


def run_example(strategy: str, cwd: Path) -> Done:
    return run_script(SCRIPT, "--strategy", strategy, "--epochs", EPOCHS, cwd=cwd)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its output by default, but after fewer epochs."""
    return run_example("megatron_ddp", tmp_path_factory.mktemp("gan")).printed


@pytest.mark.long
def test_it_learns_to_draw_digits(printed: str) -> None:
    losses = re.findall(r"^epoch \d: discriminator ([\d.]+), generator ([\d.]+)$", printed, re.MULTILINE)
    assert len(losses) == EPOCHS, "from one rank only"
    for discriminator, generator in losses:  # neither has won: it would be near zero, and the other's would soar
        assert 0.3 < float(discriminator) < 2
        assert 0.3 < float(generator) < 3
    distances = re.search(r"([\d.]+) before, ([\d.]+) after training", printed)
    assert distances is not None, printed
    before, after = map(float, distances.groups())
    assert after < before / 2
    drawing = printed.partition("\nmegatron_ddp, 2 rank(s)")[0].splitlines()[-8:]
    assert {len(line) for line in drawing} == {8 * 8 + 7 * 2}, "eight images of eight pixels, two columns between"
    assert {" ", "@"} <= set("".join(drawing)) <= set(" .:-=+*#%@")


@pytest.mark.long
def test_it_trains_as_under_ddp_that_looks_for_unused_parameters(printed: str, tmp_path: Path) -> None:
    """To the bit: the losses of every epoch, and the images."""
    strategy = "ddp_find_unused_parameters_true"
    theirs = run_example(strategy, tmp_path)
    assert theirs.returncode == 0, theirs.stdout + theirs.stderr
    assert printed.replace("megatron_ddp", strategy) == theirs.stdout


def test_plain_ddp_fails_in_the_second_backward(tmp_path: Path) -> None:
    done = run_example("ddp", tmp_path)
    assert done.returncode != 0
    assert "epoch 1:" not in done.stdout
    assert "self.manual_backward(discriminator_loss)" in done.stderr, "the first was the generator's"
    assert "parameters that were not used in producing the loss" in done.stderr
