"""Examples of Accelerate, Fabric and transformers.Trainer, and the notebook."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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
