"""The example on two ranks."""

from __future__ import annotations

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
def test_it_trains_as_under_ddp_that_looks_for_unused_parameters(printed: str, tmp_path: Path) -> None:
    """To the bit: the losses of every epoch, and the images."""
    strategy = "ddp_find_unused_parameters_true"
    theirs = run_example(strategy, tmp_path)
    assert theirs.returncode == 0, theirs.stdout + theirs.stderr
    assert printed.replace("megatron_ddp", strategy) == theirs.stdout
