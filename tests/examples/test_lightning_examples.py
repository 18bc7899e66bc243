"""Examples of a Trainer, on one rank and on several."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ..support.scripts import run_script
from .launched import EXAMPLES

# --- fine-tuning ------------------------------------------------------------------------------------------------------


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
        return Run(run_script(EXAMPLES / "lightning_finetuning.py", *options, cwd=path, ranks=devices).printed, path)

    return run


@pytest.mark.nightly
def test_finetuning_ends_with_equal_weights(runs: Runs) -> None:
    run = runs("megatron_ddp", 2)
    epochs = run.epochs()
    assert [num_trained for _, _, num_trained in epochs] == [2] * FROZEN + [6] * (EPOCHS - FROZEN), "from one rank only"
    best = max(accuracy for accuracy, _, _ in epochs)
    assert best > 88, "guessing gives 10"
    assert f"megatron_ddp, 2 rank(s): {best}% of 360 images" in run.printed
    assert "weights of the ranks: equal\n" in run.printed


@pytest.mark.nightly
def test_finetuning_on_two_ranks_equals_one(runs: Runs) -> None:
    """The frozen half and the other; what remains of a difference is another order of sums."""
    two, one = runs("megatron_ddp", 2).epochs(), runs("ddp", 1).epochs()
    assert len(two) == EPOCHS
    assert [loss for _, loss, _ in two] == pytest.approx([loss for _, loss, _ in one], rel=1e-3)
    assert [accuracy for accuracy, _, _ in two] == pytest.approx([accuracy for accuracy, _, _ in one], abs=0.6)


# --- GAN --------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_gan_equals_ddp(tmp_path: Path) -> None:
    """To the bit: the losses of every epoch, and the images."""
    strategies = ("megatron_ddp", "ddp_find_unused_parameters_true")
    ours, theirs = (
        run_script(EXAMPLES / "lightning_gan.py", "--strategy", name, "--epochs", 5, cwd=tmp_path).printed
        for name in strategies
    )
    assert ours.replace(*strategies) == theirs


# --- Muon -------------------------------------------------------------------------------------------------------------


def learn_with_muon(strategy: str, cwd: Path) -> tuple[list[tuple[str, str]], int]:
    """(percentage recognised, loss) of each epoch, and the numbers of Muon's momentum on rank 0."""
    options = ("--strategy", strategy, "--devices", 2, "--epochs", 4)
    printed = run_script(EXAMPLES / "lightning_muon.py", *options, cwd=cwd).printed
    epochs = re.findall(r"^epoch \d: ([\d.]+)% recognised, loss ([\d.]+)$", printed, re.MULTILINE)
    assert len(epochs) == 4, "from one rank only"
    kept = re.search(rf"^{strategy}, 2 rank\(s\): rank 0 keeps ([\d,]+) of 16,384 numbers", printed, re.MULTILINE)
    assert kept is not None, printed
    return epochs, int(kept[1].replace(",", ""))


@pytest.mark.nightly
def test_muon_equals_ddp_with_half_of_the_matrices(tmp_path: Path) -> None:
    """To every digit that is printed."""
    ours, num_kept = learn_with_muon("megatron_ddp", tmp_path)
    theirs, num_theirs = learn_with_muon("ddp", tmp_path)
    assert ours == theirs
    assert float(ours[-1][0]) > 90, "guessing gives 10"
    assert (num_kept, num_theirs) == (64 * 64 * 2, 64 * 64 * 4)


# --- resuming: three scripts one after the other, on 2, 1 and 3 ranks -------------------------------------------------


STEPS = 15  # an epoch


def run_part(
    strategy: str, ranks: int, epochs: int, *, cwd: Path, out: str = "runs/resume"
) -> tuple[str, dict[int, tuple[str, float]]]:
    """The strategies and ranks, and by step the learning rate and the test loss; it must succeed without a warning."""
    options = ("--strategy", strategy, "--devices", ranks, "--epochs", epochs, "--out", out)
    title, *lines = run_script(EXAMPLES / "lightning_resume.py", *options, cwd=cwd, ranks=ranks).printed.splitlines()
    rows = [re.fullmatch(r"  step +(\d+)  lr ([\d.]+)  test loss ([\d.]+)", line) for line in lines]
    return title, {int(row[1]): (row[2], float(row[3])) for row in rows if row}


def saved(folder: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(folder / "last.ckpt", weights_only=True)
    return checkpoint


@pytest.mark.nightly
def test_three_runs_are_one_run(tmp_path: Path) -> None:
    """Each starts where the one before ended, and the end is that of a run under "ddp" that was never interrupted."""
    chain: dict[int, tuple[str, float]] = {}
    folder = tmp_path / "runs" / "resume"
    for strategy, devices, epochs in (("ddp", 2, 2), ("megatron_ddp", 1, 3), ("megatron_ddp", 3, 4)):
        before = max(chain, default=0)
        title, lines = run_part(strategy, devices, epochs, cwd=tmp_path)
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

    _, whole = run_part("ddp", 1, 4, out="whole", cwd=tmp_path)
    assert list(whole) == list(chain)
    assert [lr for lr, _ in whole.values()] == [lr for lr, _ in chain.values()]
    # on one, two and three ranks the gradients of the same images are summed in other orders
    assert [loss for _, loss in chain.values()] == pytest.approx([loss for _, loss in whole.values()], rel=1e-4)
    assert chain[4 * STEPS][1] < 0.3 < 2.2 < chain[0][1], "it learned: ln 10 is what guessing costs"
    for name, value in saved(tmp_path / "whole")["state_dict"].items():
        torch.testing.assert_close(saved(folder)["state_dict"][name], value, rtol=1e-3, atol=1e-4)


# --- a model of torchvision's -----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_resnet_learns_on_two_ranks(tmp_path: Path) -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # its wheels do not import beside torch's CPU build
        pytest.skip(f"torchvision does not import: {error}")
    printed = run_script(EXAMPLES / "lightning_resnet.py", "--epochs", 2, cwd=tmp_path).printed
    assert float(re.findall(r"^megatron_ddp: ([\d.]+)% of 360 images", printed, re.M)[0]) > 90, "guessing gives 10"
