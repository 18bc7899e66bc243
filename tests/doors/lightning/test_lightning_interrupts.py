"""Ctrl-C and SIGTERM, on one rank or on all: each ends the fit on all ranks and saves."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megastrategy._faults.failure_watch import FailureWatch

from ..failing_fits import BATCH
from ..fits import AwkwardModule, loader, make_strategy, make_trainer
from ..rank_processes import Failure, Ranks


class Signals(pl.Callback):
    """A signal reaches the process in batch 3, on one rank or on all (None)."""

    def __init__(self, number: signal.Signals, rank: int | None = None) -> None:
        self.number, self.rank = number, rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH and self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), self.number)


def fit_with(callback: pl.Callback, directory: Path, strategy: str = "megatron_ddp", **options: Any) -> None:
    FailureWatch.GRACE_S = 0.5  # this process ends with the exception
    log = logging.FileHandler(directory.with_name(f"rank{os.environ['LOCAL_RANK']}.log"))
    logging.getLogger("megastrategy").addHandler(log)
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, save_top_k=0)
    trainer = make_trainer(
        make_strategy(strategy), callbacks=[callback, checkpoint], enable_checkpointing=True, **options
    )
    trainer.fit(AwkwardModule(), loader())


@pytest.mark.parametrize("strategy", ["ddp", "megatron_ddp"])
def test_ctrl_c_ends_one_rank_and_saves(one_rank: Ranks, tmp_path: Path, strategy: str) -> None:
    [outcome] = one_rank.outcomes(fit_with, Signals(signal.SIGINT), tmp_path / "run", strategy, devices=1)
    assert outcome.kind == "SystemExit"
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


def test_ctrl_c_ends_all_ranks_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    """It reaches all processes of a terminal's foreground group."""
    outcomes = ranks.outcomes(fit_with, Signals(signal.SIGINT), tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["SystemExit", "SystemExit"]
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_of_one_rank_alone_ends_all_and_saves(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    """``kill -INT`` of one process: the others, which wait for it in a collective, come and save with it."""
    outcomes = ranks.outcomes(fit_with, Signals(signal.SIGINT, rank), tmp_path / "run")
    assert outcomes[rank].kind == "SystemExit"
    assert outcomes[1 - rank].kind == "CollectiveError"
    assert f"was given up: rank {rank}: KeyboardInterrupt" in outcomes[1 - rank].message
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_sigterm_ends_all_ranks_after_the_batch_and_saves(ranks: Ranks, tmp_path: Path, rank: int | None) -> None:
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


def test_sigterm_that_finds_ranks_at_different_points_ends_all_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    """Under "ddp" Lightning's handler, a collective of its own, hangs or fails here in most runs."""
    for outcome in ranks.outcomes(fit_with, SignalsAtAnyPoint(), tmp_path / "run", max_epochs=10_000):
        assert isinstance(outcome, Failure)
        assert outcome.kind == SIGTERMException.__name__
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] > BATCH


def test_a_fit_leaves_lightnings_handling_of_sigterm_as_it_was(ranks: Ranks) -> None:
    ranks.run(check_sigterm_handling)


def check_sigterm_handling() -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(make_strategy("megatron_ddp"), max_epochs=1)
    trainer.fit(AwkwardModule(), loader())
    assert signal.getsignal(signal.SIGTERM) is before
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)
    assert "_slurm_sigusr_handler_fn" not in vars(trainer._signal_connector)
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
