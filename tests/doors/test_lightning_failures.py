"""An exception anywhere, on one rank or on all: nothing hangs, every rank says why, and the next fit works.

The limit of each job is far below the process group's timeout (half an hour), so a rank that waits for it fails.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn import functional as F

from megastrategy import MegatronDDPStrategy

from .fits import AwkwardModule, assert_same_tensors, fit, loader, make_strategy, make_trainer
from .rank_processes import Failure, Ranks

BATCH = 3
"""The batch in which things happen: two after the first, so that states exist, and some before the epoch's end."""


class OnPurposeError(Exception):
    """What the tests raise."""


# --- where -----------------------------------------------------------------------------------------------------------


def raise_on(module: pl.LightningModule, rank: int | None, batch_idx: int) -> None:
    if batch_idx == BATCH and rank in (None, module.trainer.global_rank):
        raise OnPurposeError(f"rank {module.trainer.global_rank}")


class RaisesIn(AwkwardModule):
    """Raises in batch 3, in the place called ``where``, on one rank or on all (None)."""

    def __init__(self, where: str, rank: int | None) -> None:
        super().__init__()
        self.where, self.rank = where, rank

    def _raise(self, where: str, batch_idx: int) -> None:
        if where == self.where:
            raise_on(self, self.rank, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._raise("forward", batch_idx)
        features, tokens, targets = batch
        # logs nothing with sync_dist, which is a collective of Lightning's own: its error is torch's
        loss = F.cross_entropy(self(features, tokens, use_side=batch_idx % 2 == 1), targets)
        if self.where == "backward":
            loss.register_hook(lambda grad: self._raise("backward", batch_idx))
        return loss

    def on_after_backward(self) -> None:
        self._raise("on_after_backward", self.trainer.fit_loop.batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._raise("on_before_optimizer_step", self.trainer.fit_loop.batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        module = self

        class Raising(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                if module.trainer.training:  # not in the trial step of the probe
                    module._raise("step", module.trainer.fit_loop.batch_idx)
                return super().step(closure)

        return Raising(self.parameters(), lr=1e-2)


class RaisesInCallback(pl.Callback):
    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        raise_on(pl_module, self.rank, batch_idx)


PLACES = ["forward", "backward", "on_after_backward", "on_before_optimizer_step", "step", "callback"]


def fit_raising(place: str, rank: int | None, sharded: bool, callbacks: tuple[pl.Callback, ...] = ()) -> pl.Trainer:
    """Fits, and lets the exception out."""
    if place == "callback":
        callbacks = (*callbacks, RaisesInCallback(rank))
    strategy = make_strategy("megatron_ddp", use_distributed_optimizer=sharded)
    saving = bool([callback for callback in callbacks if isinstance(callback, ModelCheckpoint)])
    trainer = make_trainer(strategy, callbacks=list(callbacks), enable_checkpointing=saving)
    trainer.fit(RaisesIn(place, rank), loader())
    return trainer


# --- one rank alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_rank_ends_both(ranks: Ranks, place: str, sharded: bool) -> None:
    """As soon as the rank's process ends, as a script's would; each rank says why."""
    waiting, raising = ranks.outcomes(fit_raising, place, 1, sharded)
    assert isinstance(raising, Failure)
    assert (raising.kind, raising.message) == ("OnPurposeError", "rank 1")
    assert isinstance(waiting, Failure)
    assert waiting.kind == "CollectiveError"
    assert "rank 0 of 2: " in waiting.message
    assert "another rank ended with an error" in waiting.message
    assert waiting.seconds < 30


def test_saving_on_exception_does_not_hang_when_one_rank_alone_raises(ranks: Ranks, tmp_path: Path) -> None:
    """Under "ddp" it waits for the others, and they wait for it. Half a state is not written."""
    waiting, raising = ranks.outcomes(fit_saving_alone, tmp_path / "run")
    assert isinstance(raising, Failure)
    assert isinstance(waiting, Failure)
    assert (raising.kind, waiting.kind) == ("OnPurposeError", "CollectiveError")
    assert waiting.seconds < 30
    assert not list((tmp_path / "run").glob("*.ckpt"))


def fit_saving_alone(directory: Path) -> None:
    MegatronDDPStrategy.patience = timedelta(seconds=2)  # this process ends with the exception
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, save_top_k=0)
    fit_raising("forward", 1, True, (checkpoint,))


# --- all ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_the_next_fit_in_the_process_works(ranks: Ranks, place: str, sharded: bool) -> None:
    """In a notebook one corrects the error and goes on."""
    assert ranks.run(fit_again_after_exception, place, sharded) == ["rank 0", "rank 1"]


def fit_again_after_exception(place: str, sharded: bool) -> str:
    with pytest.raises(OnPurposeError) as raised:
        fit_raising(place, None, sharded)
    again = fit("megatron_ddp", strategy_options={"use_distributed_optimizer": sharded})
    assert_same_tensors(again.weights, fit("ddp").weights)
    return str(raised.value)


# --- saving on the way out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("place", ["forward", "backward", "on_before_optimizer_step"])
def test_a_checkpoint_on_exception_is_whole(ranks: Ranks, tmp_path: Path, place: str, sharded: bool) -> None:
    """The optimizer's shards are gathered by a group made for it, since the old one may be in any state."""
    directory = tmp_path / "run"
    for outcome in ranks.run(fit_saving_on_exception, place, None, sharded, directory):
        assert outcome == "raised"
    [path] = directory.glob("*.ckpt")
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == BATCH
    trainable = [param for param in AwkwardModule().parameters() if param.requires_grad]
    assert len(state["optimizer_states"][0]["state"]) == len(trainable)


def fit_saving_on_exception(place: str, rank: int | None, sharded: bool, directory: Path) -> str:
    checkpoint = ModelCheckpoint(dirpath=directory, filename="{step}", save_on_exception=True, save_top_k=0)
    with pytest.raises(Exception, match=r"rank [01]"):
        fit_raising(place, rank, sharded, (checkpoint,))
    return "raised"


# --- signals ---------------------------------------------------------------------------------------------------------


class Interrupts(pl.Callback):
    """Ctrl-C, which reaches all processes of a terminal's foreground group."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_all_ranks_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.outcomes(fit_with, Interrupts(), tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["SystemExit", "SystemExit"]
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


class Terminates(pl.Callback):
    """As SLURM does when the time is up: SIGTERM to every task."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_all_ranks_after_the_batch_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    for outcome in ranks.outcomes(fit_with, Terminates(), tmp_path / "run"):
        assert isinstance(outcome, Failure)
        assert outcome.kind == SIGTERMException.__name__
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH + 1


def fit_with(callback: pl.Callback, directory: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, save_top_k=0)
    trainer = make_trainer(make_strategy("megatron_ddp"), callbacks=[callback, checkpoint], enable_checkpointing=True)
    trainer.fit(AwkwardModule(), loader())
