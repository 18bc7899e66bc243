"""Examples of Accelerate, Fabric, transformers.Trainer and Lightning's Trainer, and the notebook."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from megastrategy.accelerate.checkpoint import DIRECTORY

from ..support.comparison import assert_equal
from ..support.scripts import run_script
from ..support.timeouts import HANG_S
from .launched import EXAMPLES, OURS, launch_example, run_example

# --- accelerate_text.py -----------------------------------------------------------------------------------------------


TEXT = "accelerate_text.py"


def epochs(printed: str) -> list[tuple[str, str]]:
    """(loss, accuracy) of each, as printed."""
    return re.findall(r"epoch \d+: loss ([\d.]+), ([\d.]+)% of 500 lines", printed)


def test_text_learns_and_resumes(tmp_path: Path) -> None:
    printed = run_example(TEXT, "--epochs", "2", cwd=tmp_path)
    assert len(epochs(printed)) == 2
    assert float(epochs(printed)[-1][1]) > 85, "guessing gives 50"
    resumed = run_example(TEXT, "--epochs", "3", "--resume", "runs/text/megatron_ddp/last", cwd=tmp_path, processes=1)
    assert re.findall(r"epoch (\d)", resumed) == ["3"], "the one that was left"
    assert float(epochs(resumed)[-1][1]) > 85


@pytest.mark.nightly
def test_text_equals_ddp_and_by_the_launcher(tmp_path: Path) -> None:
    """To the bit, if nothing is clipped: the norm that clips is summed shard by shard, and by parameters there."""
    options = ("--clip", "0", "--epochs", "3")
    ours = run_example(TEXT, *options, cwd=tmp_path)
    theirs = run_example(TEXT, *options, "--engine", "accelerate", cwd=tmp_path)
    assert epochs(ours) == epochs(theirs)
    assert len(epochs(ours)) == 3
    folders = [tmp_path / "runs" / "text" / engine for engine in ("megatron_ddp", "accelerate")]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert sorted(first) == ["embed.weight", "head.bias", "head.weight", "windows.bias", "windows.weight"]
    assert all((first[name] == second[name]).all() for name in second)
    # under the launcher accelerate's own Accelerator is ours
    launched = launch_example(
        TEXT,
        *(*options, "--engine", "accelerate", "--out", "launched"),
        cwd=tmp_path,
        MEGATRON_DDP_STATE_DICT_TYPE="sharded",
    )
    assert (tmp_path / "launched" / "accelerate" / "last" / DIRECTORY).is_dir()
    assert epochs(launched) == epochs(ours)


# --- fabric_digits.py -------------------------------------------------------------------------------------------------


def metrics(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file)]


def test_digits_equal_ddp(tmp_path: Path) -> None:
    """To the bit, if nothing is clipped: the norm that clips is summed shard by shard, and by parameters under ddp."""
    ours, theirs = (
        run_script(
            EXAMPLES / "fabric_digits.py", "--epochs", "1", "--clip", "0", "--strategy", strategy, cwd=tmp_path
        ).printed
        for strategy in ("megatron_ddp", "ddp")
    )
    assert ours.replace("megatron_ddp", "ddp") == theirs
    run_dir = tmp_path / "runs" / "digits"
    assert len(metrics(run_dir / "ddp")) == 12  # 23 batches a rank, two a step, the last alone
    assert metrics(run_dir / "megatron_ddp") == metrics(run_dir / "ddp")


# --- notebook.ipynb, in a kernel of its own, as Jupyter runs it -------------------------------------------------------


@pytest.mark.nightly
def test_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", f"--output={tmp_path / 'run'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, EXAMPLES / "notebook.ipynb"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("run*")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    printed = "".join(str(output.get("text", "")) for output in cells[-1]["outputs"])
    read = re.search(r"2 processes, ([\d.]+)% of 360 digits read", printed)
    assert read is not None, printed
    assert float(read[1]) > 90, "guessing gives 10"


# --- transformers_trainer.py ------------------------------------------------------------------------------------------


TRAINER = "transformers_trainer.py"


OF_A_CLOCK = ("runtime", "samples_per_second", "steps_per_second")


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged values, without times."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{key: value for key, value in entry.items() if not key.endswith(OF_A_CLOCK)} for entry in entries]


def told_right(printed: str) -> float:
    """Percent of the lines that were not trained on, by the best model."""
    [percent] = re.findall(r"([\d.]+)% of 640 lines told right by the best of 3 epochs", printed)
    return float(percent)


@pytest.mark.nightly
def test_trainer_equals_ddp_and_resumes(tmp_path: Path) -> None:
    options = ("--clip", "0", "--epochs", "3")
    theirs = run_example(TRAINER, *options, "--out", "theirs", cwd=tmp_path)
    ours = run_example(TRAINER, *options, "--out", "ours", cwd=tmp_path, launcher=OURS)
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
    resumed = run_example(TRAINER, *resume, cwd=tmp_path, launcher=OURS, processes=1)
    steps = [entry["step"] for entry in history(tmp_path / "resumed") if "loss" in entry]
    assert steps == [40, 80, 120]
    assert not (tmp_path / "resumed" / "checkpoint-80").exists(), "trained was only the epoch that was left"
    assert told_right(resumed) > 50


# --- lora_transformers.py ---------------------------------------------------------------------------------------------


def test_lora_trains_an_adapter(tmp_path: Path) -> None:
    printed = run_example("lora_transformers.py", "--epochs", "12", cwd=tmp_path, launcher=OURS)
    [loss] = re.findall(r"mean loss ([\d.]+) nats", printed)
    assert float(loss) < 5.2, "guessing gives 5.5"
    adapter = load_file(tmp_path / "runs" / "lora" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 2 * 4, "two matrices for each of four linear layers in two blocks"


# --- fine-tuning ------------------------------------------------------------------------------------------------------


EPOCHS, FROZEN = 6, 3  # of fine-tuning; the backbone is frozen for the first half


class FineTuning(NamedTuple):
    printed: str
    path: Path

    def epochs(self) -> list[tuple[float, float, int]]:
        """(percentage recognised, loss, number of parameters trained) of each epoch of fine-tuning."""
        lines = re.findall(
            r"^10 digits, epoch \d: ([\d.]+)% recognised, loss ([\d.]+), (\d) parameters trained$", self.printed, re.M
        )
        return [(float(accuracy), float(loss), int(num_trained)) for accuracy, loss, num_trained in lines]


Runs = Callable[[str, int], FineTuning]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """(strategy, devices) -> what a script printed, which succeeded without a warning; each runs once."""

    @cache
    def run(strategy: str, devices: int) -> FineTuning:
        path = tmp_path_factory.mktemp("finetuning")
        options = ("--strategy", strategy, "--devices", devices, "--epochs", EPOCHS)
        return FineTuning(
            run_script(EXAMPLES / "lightning_finetuning.py", *options, cwd=path, ranks=devices).printed, path
        )

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
    assert float(re.findall(r"^megatron_ddp: ([\d.]+)% of 360 images", printed, re.M)[0]) > 50, "guessing gives 10"
