"""Ctrl-C, SIGTERM and the signals of Slurm, on one rank or on all: each ends the fit on all ranks, and saves.

In evaluation nothing makes ranks compare notes batch by batch. A hundred batches take 0.1 s each there, so a rank that
waits for the end takes ten seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from megastrategy._faults.failure_watch import FailureWatch
from tests.support.scripts import run_script

from ..fits import BUCKET_SIZE, AwkwardModule, loader, make_strategy, make_trainer
from ..rank_processes import Failure, Ranks

BATCH = 3


class Signals(pl.Callback):
    """A signal reaches the process in batch 3, on one rank or on all (None)."""

    def __init__(self, number: signal.Signals, rank: int | None = None) -> None:
        self.number, self.rank = number, rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH and self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), self.number)


def fit_with(callback: pl.Callback, directory: Path, **options: Any) -> None:
    FailureWatch.GRACE_S = 0.5  # this process ends with the exception
    log = logging.FileHandler(directory.with_name(f"rank{os.environ['LOCAL_RANK']}.log"))
    logging.getLogger("megastrategy").addHandler(log)
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, save_top_k=0)
    trainer = make_trainer(
        make_strategy("megatron_ddp"), callbacks=[callback, checkpoint], enable_checkpointing=True, **options
    )
    trainer.fit(AwkwardModule(), loader())


@pytest.mark.parametrize("pool", ["one_rank", "ranks"])
def test_ctrl_c_ends_all_ranks_and_saves(request: pytest.FixtureRequest, tmp_path: Path, pool: str) -> None:
    """It reaches all processes of a terminal's foreground group."""
    for outcome in request.getfixturevalue(pool).outcomes(fit_with, Signals(signal.SIGINT), tmp_path / "run"):
        assert outcome.kind == "SystemExit"
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


def test_interrupt_of_one_rank_ends_all_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    """``kill -INT`` of one process: the others, which wait for it in a collective, come and save with it."""
    waiting, interrupted = ranks.outcomes(fit_with, Signals(signal.SIGINT, 1), tmp_path / "run")
    assert interrupted.kind == "SystemExit"
    assert waiting.kind == "CollectiveError"
    assert "was given up: rank 1: KeyboardInterrupt" in waiting.message
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


@pytest.mark.parametrize("rank", [None, 1])
def test_sigterm_ends_all_after_the_batch_and_saves(ranks: Ranks, tmp_path: Path, rank: int | None) -> None:
    """SLURM sends it to every task when the time is up; where it reaches one rank alone, all stop, too."""
    for outcome in ranks.outcomes(fit_with, Signals(signal.SIGTERM, rank), tmp_path / "run"):
        assert isinstance(outcome, Failure)
        assert outcome.kind == SIGTERMException.__name__
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH + 1


class SignalsAtAnyPoint(pl.Callback):
    """SIGTERM at a time of its own on each rank, wherever that is."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == BATCH:
            delay_s = 0.05 if trainer.global_rank == 0 else 0.1
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()


def test_sigterm_at_different_points_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    """Under "ddp" Lightning's handler, a collective of its own, hangs or fails here in most runs."""
    for outcome in ranks.outcomes(fit_with, SignalsAtAnyPoint(), tmp_path / "run", max_epochs=10_000):
        assert isinstance(outcome, Failure)
        assert outcome.kind == SIGTERMException.__name__
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] > BATCH


def test_fit_leaves_handling_of_sigterm_as_it_was(ranks: Ranks) -> None:
    ranks.run(check_sigterm_handling)


def check_sigterm_handling() -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(make_strategy("megatron_ddp"), max_epochs=1)
    trainer.fit(AwkwardModule(), loader())
    assert signal.getsignal(signal.SIGTERM) is before
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)
    assert "_slurm_sigusr_handler_fn" not in vars(trainer._signal_connector)
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)


# --- in evaluation ---------------------------------------------------------------------------------------------------


LIMIT_S = 3.0
"""From the first signal to the end of the last rank. A second of it is how often a rank that waits looks around."""

BATCH_S = 0.1
NUM_BATCHES = 100
SENT_IN = 3
"""The batch in which the signal comes."""

STAGES = ["training", "sanity", "validation", "validate", "test", "predict"]


class Slow(pl.LightningModule):
    """Sends a signal in one stage, on one rank or on all (None).

    Args:
        stage: one of ``STAGES``; none of them: no signal.
        rank: the rank that gets the signal, if it exists.
        directory: where every rank that gets it writes down when.
    """

    def __init__(
        self,
        stage: str,
        rank: int | None,
        directory: Path,
        number: int = signal.SIGTERM,
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.stage, self.rank, self.directory, self.number = stage, rank, directory, number
        self.num_evaluated = 0
        self.saved_at: list[tuple[int, int]] = []

    def _send(self, stage: str, batch_idx: int) -> None:
        at = self.directory / f"sent_{self.global_rank}"
        if stage == self.stage and batch_idx == SENT_IN and self.rank in (None, self.global_rank) and not at.exists():
            at.write_text(f"{time.time()}")
            os.kill(os.getpid(), self.number)

    def _evaluate(self, stage: str, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.stage == stage and self.trainer.current_epoch == 0:
            time.sleep(BATCH_S)
        self._send(stage, batch_idx)
        self.num_evaluated = batch_idx + 1
        return self.layer(batch[0]).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.stage == "training":
            time.sleep(BATCH_S)
        self._send("training", batch_idx)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.trainer.state.fn == "validate":
            stage = "validate"
        else:
            stage = "sanity" if self.trainer.sanity_checking else "validation"
        self.log("loss", self._evaluate(stage, batch, batch_idx), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self._evaluate("test", batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("predict", batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved_at.append((self.trainer.global_step, self.num_evaluated))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def data(num_batches: int = NUM_BATCHES) -> DataLoader[Any]:
    samples = torch.randn(2 * 2 * num_batches, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(samples), batch_size=2)


def run(stage: str, rank: int | None, directory: Path, devices: int = 2) -> str:
    """Fits with the signal, and lets what it raises out."""
    model = Slow(stage, rank, directory)
    trainer = make_trainer(
        make_strategy("megatron_ddp", bucket_size=BUCKET_SIZE),
        devices=devices,
        max_epochs=2,
        num_sanity_val_steps=-1 if stage == "sanity" else 0,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=directory / "saved", save_on_exception=True, save_top_k=0)],
    )
    validation = data() if stage in ("validation", "sanity") else data(2)
    if stage in ("training", "validation", "sanity"):
        trainer.fit(model, data(NUM_BATCHES if stage == "training" else 5), validation)
    elif stage == "predict":
        trainer.predict(model, data())
    else:
        getattr(trainer, stage)(model, data(), verbose=False)
    return f"ended by itself at step {trainer.global_step}"


def since_the_first(directory: Path) -> float:
    """Seconds since the first rank got the signal."""
    return time.time() - min(float(path.read_text()) for path in directory.glob("sent_*"))


def assert_ended_for_sigterm(outcomes: list[Any], directory: Path) -> None:
    took_s = since_the_first(directory)
    for outcome in outcomes:
        assert isinstance(outcome, Failure), outcome
        assert outcome.kind == SIGTERMException.__name__, outcome.traceback
    assert took_s < LIMIT_S


@pytest.mark.parametrize(("stage", "rank"), [("training", None), ("validation", 1), ("test", 0)])
def test_sigterm_ends_all_ranks_soon_in_a_stage(ranks: Ranks, tmp_path: Path, stage: str, rank: int | None) -> None:
    assert_ended_for_sigterm(ranks.outcomes(run, stage, rank, tmp_path, timeout_s=40), tmp_path)
    if stage == "validation":
        [path] = (tmp_path / "saved").glob("*.ckpt")
        assert torch.load(path, weights_only=True)["global_step"] == 5


# --- to save and queue again -----------------------------------------------------------------------------------------

NUM_EVALUATED = 40


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


def fit_in_a_job(
    directory: Path, job: dict[str, str], stage: str, rank: int | None = None
) -> tuple[list[tuple[int, int]], int]:
    """The position of the save (steps, batches of the validation), and the steps at the end."""
    local_rank = os.environ["LOCAL_RANK"]
    with mock.patch.dict(os.environ, {**job, "SLURM_PROCID": local_rank, "SLURM_LOCALID": local_rank}):
        model = Slow(stage, rank, directory, signal.SIGUSR1)
        trainer = make_trainer(
            make_strategy("megatron_ddp", bucket_size=BUCKET_SIZE),
            plugins=[SLURMEnvironment()],
            num_sanity_val_steps=0,
            default_root_dir=directory,
        )
        trainer.fit(model, data(5), data(NUM_EVALUATED))
    return model.saved_at, trainer.global_step


def test_job_resumes_from_a_validation(ranks: Ranks, tmp_path: Path) -> None:
    job = slurm_job(tmp_path, num_tasks=2)
    evaluated = []
    for saved_at, steps in ranks.run(fit_in_a_job, tmp_path, job, "validation"):
        [(step, num_evaluated)] = saved_at
        assert (step, steps) == (5, 10)
        evaluated.append(num_evaluated)
    # nothing keeps ranks together here: one may be batches behind the one that got the signal first
    assert SENT_IN < max(evaluated) < NUM_EVALUATED
    assert (tmp_path / "requeued").read_text().splitlines() == ["requeue 4711"]
    checkpoint = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 5
    assert {state["step"].item() for state in checkpoint["optimizer_states"][0]["state"].values()} == {5}
    for saved_at, steps in ranks.run(fit_in_a_job, tmp_path, job, "none"):
        assert (saved_at, steps) == ([], 10)


@pytest.mark.parametrize("rank", [None, 0])
def test_all_ranks_save_before_the_same_batch(ranks: Ranks, tmp_path: Path, rank: int | None) -> None:
    job = slurm_job(tmp_path, num_tasks=2)
    for saved_at, steps in ranks.run(fit_in_a_job, tmp_path, job, "training", rank):
        assert (saved_at, steps) == ([(SENT_IN + 1, 0)], 10)
    assert (tmp_path / "requeued").read_text().splitlines() == ["requeue 4711"]
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] == SENT_IN + 1


# --- one rank --------------------------------------------------------------------------------------------------------

ONE_RANK = """
import pathlib
import time

from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.doors.lightning.test_signals import STAGES, run

for stage in STAGES:
    (folder := pathlib.Path(stage)).mkdir()
    try:
        print("ENDED", run(stage, None, folder, devices=1))
    except SIGTERMException:
        print("STAGE", stage, time.time() - float((folder / "sent_0").read_text()))
"""


def test_sigterm_ends_one_rank_soon_in_each_stage(tmp_path: Path) -> None:
    """One after the other in one process, so that none leaves anything to the next."""
    (tmp_path / "script.py").write_text(ONE_RANK)
    done = run_script(tmp_path / "script.py", cwd=tmp_path, ranks=1)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("STAGE", "ENDED"))]
    assert [line[:2] for line in lines] == [["STAGE", stage] for stage in STAGES]
    assert max(float(line[2]) for line in lines) < LIMIT_S


def test_job_of_one_rank_saves_and_resumes(one_rank: Ranks, tmp_path: Path) -> None:
    job, step = slurm_job(tmp_path, num_tasks=1), SENT_IN + 1
    [(saved_at, steps)] = one_rank.run(fit_in_a_job, tmp_path, job, "training")
    assert ([saved_step for saved_step, _ in saved_at], steps) == ([step], 20)
    assert (tmp_path / "requeued").read_text().splitlines() == ["requeue 4711"]
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] == step
    assert one_rank.run(fit_in_a_job, tmp_path, job, "none") == [([], 20)]
