"""The example, tiny."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ..support.patience import HANG_S
from ..support.scripts import Done, run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TINY = ("--steps", "20", "--batch-size", "4", "--context", "32", "--width", "32", "--depth", "1", "--devices", "2")


def run_example(*arguments: str | Path, cwd: Path, ranks: int = 2) -> Done:
    return run_script(SCRIPT, *arguments, cwd=cwd, ranks=ranks)


def start_example(*arguments: str | Path, cwd: Path) -> Done:
    """As ``make demo`` does: a script that starts its own second process."""
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=HANG_S
    )
    return Done(done.returncode, done.stdout, done.stderr)


def losses(run_dir: Path, column: str) -> list[float]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


STARTS = [run_example, pytest.param(start_example, marks=[pytest.mark.long, pytest.mark.fresh])]


@pytest.fixture(scope="module", params=STARTS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """The second of two runs in one directory, which replaces the first and does not complain; the directory."""
    run: Callable[..., Done] = request.param
    folder = tmp_path_factory.mktemp("gpt")
    for steps in ("2", "20"):
        done = run(*TINY, "--steps", steps, cwd=folder)
    return done, folder


def test_it_trains_and_leaves_a_checkpoint_a_picture_and_a_sample(trained: tuple[Done, Path]) -> None:
    done, folder = trained
    printed, out = done.printed, folder / "runs" / "gpt"
    run_dir = out / "megatron_ddp"
    assert {path.name for path in out.iterdir()} == {"loss.png", "megatron_ddp"}
    assert {path.name for path in run_dir.iterdir()} == {"metrics.csv", "hparams.yaml", "best.ckpt", "last.ckpt"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert torch.load(run_dir / "best.ckpt", weights_only=True)["state_dict"]["bytes.weight"].shape == (256, 32)

    train_loss = losses(run_dir, "train_loss")
    assert len(train_loss) == 20
    assert train_loss[0] == pytest.approx(5.545, abs=0.1)  # ln 256: an untrained model knows nothing
    assert train_loss[-1] < train_loss[0] - 0.5
    val_loss = losses(run_dir, "val_loss")
    assert f"training loss    {train_loss[0]:.4f} nats a byte at the first step" in printed
    assert f"validation loss  {min(val_loss):.4f} nats a byte at the end" in printed
    assert re.search(r"throughput       [\d,]+ tokens/s", printed)
    assert printed.count("sample:\n\nThe ") == 1  # from one rank only
    assert len(printed.rsplit("sample:", 1)[1]) > 100
    progress = re.findall(r"^  step +(\d+)/20   train_loss [\d.]+(?:   val_loss [\d.]+)?$", printed, re.MULTILINE)
    assert progress == [str(step) for step in range(2, 21, 2)], "a line for each tenth, from one rank only"


def test_compare_trains_the_same_model_under_ddp_on_the_users_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(64)) * 64)
    done = run_example(*TINY, "--compare", "--data", text, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, ddps = (losses(tmp_path / "out" / strategy, "train_loss") for strategy in ("megatron_ddp", "ddp"))
    # Not to the bit: the norm that clips is summed shard by shard here, parameter by parameter under ddp.
    assert ours == pytest.approx(ddps, abs=1e-4)
    largest = max(abs(a - b) for a, b in zip(ours, ddps, strict=True))
    assert f"{largest:.1e} in the first 20 steps" in done.stdout
    assert (tmp_path / "out" / "loss.png").stat().st_size > 0
