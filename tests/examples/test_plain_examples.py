"""Examples of a plain loop, and that they run from a clone."""

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

from ..support.scripts import Done, run_script
from ..support.timeouts import HANG_S
from .launched import EXAMPLES, OURS, losses, run_example


def test_index_has_every_example() -> None:
    """By its link; the picture of replicas is no example of its own."""
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".ipynb", ".sh", ".sbatch", ".yaml")]
    names = {str(path.relative_to(EXAMPLES)) for path in files} - {"replicas_picture.py", "slurm/lighthouse.sbatch"}
    assert names == set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "launcher", "most"),
    [
        ("with_trainer.py", (), 0.5),
        ("with_fabric.py", (), 0.5),
        ("with_accelerate.py", OURS, 0.5),
        ("with_transformers.py", OURS, 1.5),
        ("plain_loop.py", (), 0.5),
    ],
)
def test_template_learns(name: str, launcher: tuple[str, ...], most: float, tmp_path: Path) -> None:
    """Losses begin at the variance of a sum of eight, or near the logarithm of 32; one rank tells of the setup."""
    environment = {"ACCELERATE_USE_CPU": "true"}
    done = run_script(EXAMPLES / "templates" / name, cwd=tmp_path, environment=environment, before=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    [loss] = re.findall(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(loss) < most
    assert (done.stdout + done.stderr).count("megatron_ddp on 2 rank(s)") == (name != "plain_loop.py")


# --- train_gpt.py -----------------------------------------------------------------------------------------------------


GPT = EXAMPLES / "train_gpt.py"


TINY = ("--steps", "20", "--batch-size", "4", "--context", "32", "--width", "32", "--depth", "1", "--devices", "2")


def train_gpt(*arguments: str | Path, cwd: Path) -> Done:
    return run_script(GPT, *arguments, cwd=cwd)


def start_gpt(*arguments: str | Path, cwd: Path) -> Done:
    """As ``make demo`` does: a script that starts its own second process."""
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(GPT), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=HANG_S
    )
    return Done(done.returncode, done.stdout, done.stderr)


def logged(run_dir: Path, column: str) -> list[float]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


STARTS = [train_gpt, pytest.param(start_gpt, marks=pytest.mark.nightly)]


@pytest.fixture(scope="module", params=STARTS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """The second of two runs in one directory, which replaces the first and does not complain; the directory."""
    run: Callable[..., Done] = request.param
    folder = tmp_path_factory.mktemp("gpt")
    for steps in ("2", "20"):
        done = run(*TINY, "--steps", steps, cwd=folder)
    return done, folder


def test_gpt_leaves_checkpoint_picture_and_sample(trained: tuple[Done, Path]) -> None:
    done, folder = trained
    printed, out = done.printed, folder / "runs" / "gpt"
    run_dir = out / "megatron_ddp"
    assert {path.name for path in out.iterdir()} == {"loss.png", "megatron_ddp"}
    assert {path.name for path in run_dir.iterdir()} == {"metrics.csv", "hparams.yaml", "best.ckpt", "last.ckpt"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert torch.load(run_dir / "best.ckpt", weights_only=True)["state_dict"]["bytes.weight"].shape == (256, 32)

    train_loss = logged(run_dir, "train_loss")
    assert len(train_loss) == 20
    assert train_loss[0] == pytest.approx(5.545, abs=0.1)  # ln 256: an untrained model knows nothing
    assert train_loss[-1] < train_loss[0] - 0.5
    val_loss = logged(run_dir, "val_loss")
    assert f"training loss    {train_loss[0]:.4f} nats a byte at the first step" in printed
    assert f"validation loss  {min(val_loss):.4f} nats a byte at the end" in printed
    assert re.search(r"throughput       [\d,]+ tokens/s", printed)
    assert printed.count("sample:\n\nThe ") == 1  # from one rank only
    assert len(printed.rsplit("sample:", 1)[1]) > 100
    progress = re.findall(r"^  step +(\d+)/20   train_loss [\d.]+(?:   val_loss [\d.]+)?$", printed, re.MULTILINE)
    assert progress == [str(step) for step in range(2, 21, 2)], "a line for each tenth, from one rank only"


SMALL = (*TINY, "--width", "64", "--depth", "2", "--compare")
"""Large enough for a norm whose last bit depends on the order of its sums."""


def test_compare_trains_gpt_under_ddp_too(tmp_path: Path) -> None:
    done = train_gpt(*SMALL, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, ddps = (logged(tmp_path / "out" / strategy, "train_loss") for strategy in ("megatron_ddp", "ddp"))
    # Not to the bit: the norm that clips is summed shard by shard here, parameter by parameter under ddp.
    assert ours == pytest.approx(ddps, abs=1e-4)
    largest = max(abs(a - b) for a, b in zip(ours, ddps, strict=True))
    assert largest > 0
    assert f"{largest:.1e} in the first 20 steps\nIt comes from clipping" in done.stdout
    assert (tmp_path / "out" / "loss.png").stat().st_size > 0


def test_gpt_without_clipping_equals_ddp(tmp_path: Path) -> None:
    """As the script says under the differences that it prints."""
    script = tmp_path / "unclipped.py"
    script.write_text(GPT.read_text().replace("gradient_clip_val=1.0", "gradient_clip_val=None"))
    done = run_script(script, *SMALL, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.0e+00 in the first 20 steps\n\nsample" in done.stdout


# --- divided models beside the same script in one process -------------------------------------------------------------


@pytest.mark.nightly
def test_llava_in_stages_equals_one_process(tmp_path: Path) -> None:
    run_example("llava_like.py", "--stages", "1", "--steps", "30", "--out", "alone", cwd=tmp_path, processes=1)
    alone = losses(tmp_path / "alone")
    assert alone[-1] < alone[0] - 0.4, "it learns"
    expected = torch.load(tmp_path / "alone" / "last.pt", weights_only=True)
    for stages in (4, 2):
        out = f"{stages} stages"
        printed = run_example(
            "llava_like.py", "--stages", f"{stages}", "--steps", "30", "--out", out, cwd=tmp_path, processes=4
        )
        assert f"{stages} stages x {4 // stages}: " in printed
        assert losses(tmp_path / out) == pytest.approx(alone, abs=1e-4)
        weights = torch.load(tmp_path / out / "last.pt", weights_only=True)
        assert list(weights) == list(expected)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0.0, atol=2e-3)


@pytest.mark.nightly
def test_divided_experts_equal_one_process(tmp_path: Path) -> None:
    printed = run_example("moe_gpt.py", "--steps", "12", "--compare", "--out", "all", cwd=tmp_path, processes=4)
    assert "dp 4 = ep 2 x edp 2, 4 experts on a rank:" in printed
    rows = [(float(on_ranks), float(alone)) for on_ranks, alone in re.findall(r"\d+  (\S+)  (\S+)\n", printed)]
    found = losses(tmp_path / "all")
    assert len(rows) == len(found) == 12
    assert [alone for _, alone in rows] == pytest.approx(found, abs=5e-6)
    assert found[-1] < found[0] - 1.0, "it learns"
    # Saved on 4 x 1 ranks, and resumed in one process, as if one run had made all steps.
    run_example("moe_gpt.py", "--ep", "4", "--steps", "8", "--out", "four", cwd=tmp_path, processes=4)
    resume = ("--resume", "four/last.pt", "--steps", "4", "--out", "resumed")
    run_example("moe_gpt.py", "--ep", "1", *resume, cwd=tmp_path, processes=1)
    assert losses(tmp_path / "resumed") == pytest.approx(found[8:], abs=5e-6)


@pytest.mark.nightly
def test_tensor_ranks_equal_one_process(tmp_path: Path) -> None:
    run_example("tensor_parallel_gpt.py", "--tp", "1", "--steps", "12", "--out", "alone", cwd=tmp_path, processes=1)
    printed = run_example("tensor_parallel_gpt.py", "--steps", "8", "--out", "mesh", cwd=tmp_path, processes=4)
    alone, mesh = losses(tmp_path / "alone"), losses(tmp_path / "mesh")
    assert "dp 2 x tp 2:" in printed
    assert mesh == pytest.approx(alone[:8], abs=1e-5)
    assert alone[-1] < alone[0] - 1.0, "it learns"
    # and one process goes on from what the mesh saved, as if it had trained all along
    resume = ("--resume", "mesh/last.pt", "--steps", "4", "--out", "resumed")
    run_example("tensor_parallel_gpt.py", "--tp", "1", *resume, cwd=tmp_path, processes=1)
    assert losses(tmp_path / "resumed") == pytest.approx(alone[8:], abs=1e-5)
