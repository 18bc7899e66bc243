"""SLURM's signal to save and queue the job again, which finds every rank somewhere else."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .python_processes import run_pythons
from .rank_processes import free_port

SCRIPT = """
import os
import signal
import sys
import threading

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import megastrategy


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)])

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3 and not sys.argv[1:]:  # a time of its own on each rank, wherever that is
            threading.Timer(0.02 + 0.03 * self.global_rank, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def on_train_start(self):
        print(f"START {self.trainer.global_step} ", flush=True)

    def on_train_end(self):
        print(f"END {self.trainer.global_step} ", flush=True)


data = DataLoader(TensorDataset(torch.randn(2000, 32, generator=torch.Generator().manual_seed(1))), batch_size=2)
trainer = pl.Trainer(
    strategy=megastrategy.MegatronDDPStrategy(bucket_size=2000), accelerator="cpu", devices=2, max_steps=200,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), data)
"""


def test_all_ranks_save_before_the_same_batch_and_the_job_resumes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/requeued"\n')
    scontrol.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
    }
    outputs = []
    for arguments in ([], ["resumed"]):
        port = {"MASTER_PORT": str(free_port())}
        tasks = [{**job, **port, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        outputs.append(run_pythons(["script.py", *arguments], tasks, cwd=tmp_path))
    assert (tmp_path / "requeued").read_text().splitlines() == ["requeue 4711"]
    checkpoint = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    step = checkpoint["global_step"]
    assert 3 <= step < 200
    states = checkpoint["optimizer_states"][0]["state"].values()
    assert [state["step"].item() for state in states] == [step] * 12
    for output in outputs[0]:
        assert "START 0 " in output
        assert "END 200 " in output
    for output in outputs[1]:
        assert f"START {step} " in output
        assert "END 200 " in output
