"""SLURM's signal to save and queue the job again, which finds every rank somewhere else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.ports import free_port
from tests.support.scripts import run_script

from ..python_processes import run_pythons

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


def slurm_job(folder: Path, num_tasks: int) -> dict[str, str]:
    """The environment of a job, in which ``scontrol`` writes down what it is asked."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/requeued"\n')
    scontrol.chmod(0o755)
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_NTASKS_PER_NODE": str(num_tasks),
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
    }


ONE_RANK = """
import os
import signal
import sys
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import megastrategy

when, number, resumed = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
sent_at = []


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8)

    def send(self, stage, batch_idx):
        if stage == when and batch_idx == 3 and self.trainer.global_step < 10 and not sent_at and not resumed:
            sent_at.append((self.trainer.global_step, time.monotonic()))
            os.kill(os.getpid(), number)

    def training_step(self, batch, batch_idx):
        self.send("training", batch_idx)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.send("validation", batch_idx)
        if sent_at and number == signal.SIGTERM:
            time.sleep(0.1)  # 39 more seconds of it
        self.log("loss", self.layer(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


data = DataLoader(TensorDataset(torch.randn(800, 8)), batch_size=2)
trainer = pl.Trainer(
    strategy="megatron_ddp", accelerator="cpu", devices=1, max_steps=20, val_check_interval=5, num_sanity_val_steps=0,
    limit_val_batches=4 if number != signal.SIGTERM else None,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
try:
    trainer.fit(Model(), data, data)
finally:
    waited = time.monotonic() - sent_at[0][1] if sent_at else 0
    print(f"SENT {sent_at[0][0] if sent_at else -1} STEPS {trainer.global_step} WAITED {waited:.1f} "
          f"ENDED {type(sys.exception()).__name__}")
"""


@pytest.mark.parametrize("when", ["training", "validation"])
def test_sigterm_ends_a_fit_on_one_rank_after_the_batch(tmp_path: Path, when: str) -> None:
    """Lightning compares no notes there, and the fit would go on to its end."""
    (tmp_path / "script.py").write_text(ONE_RANK)
    done = run_script(tmp_path / "script.py", when, int(signal.SIGTERM), cwd=tmp_path, ranks=1)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("SENT")]
    _, sent, _, steps, _, waited, _, ended = line.split()
    assert int(sent) >= 3
    assert int(steps) == int(sent) + (when == "training"), "the batch that was under way is done, and no other"
    assert float(waited) < 10, "the validation alone would take 39 seconds"
    assert ended == "SIGTERMException"


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", ["training", "validation"])
def test_one_rank_saves_before_the_next_batch_and_the_job_resumes(tmp_path: Path, when: str) -> None:
    job = slurm_job(tmp_path, num_tasks=1)
    (tmp_path / "script.py").write_text(ONE_RANK)
    lines = []
    for resumed in ([], ["resumed"]):
        arguments = [when, int(signal.SIGUSR1), *resumed]
        environment = {**job, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        done = run_script(tmp_path / "script.py", *arguments, cwd=tmp_path, ranks=1, environment=environment)
        lines += [line for line in done.printed.splitlines() if line.startswith("SENT")]
    assert (tmp_path / "requeued").read_text().splitlines() == ["requeue 4711"]
    sent = int(lines[0].split()[1])
    checkpoint = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    step = sent + (when == "training")
    assert checkpoint["global_step"] == step
    assert {state["step"].item() for state in checkpoint["optimizer_states"][0]["state"].values()} == {step}
    assert [line.split()[3] for line in lines] == ["20", "20"]


@pytest.mark.fresh
@pytest.mark.long
def test_all_ranks_save_before_the_same_batch_and_the_job_resumes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    job = slurm_job(tmp_path, num_tasks=2)
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
