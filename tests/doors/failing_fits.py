"""Fits in which a rank, or all, raise on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from megastrategy._faults.failure_watch import FailureWatch

from .fits import AwkwardModule, loader, make_strategy, make_trainer

BATCH = 3
"""The batch in which things happen: two after the first, so that states exist, and some before the epoch's end."""


class OnPurposeError(Exception):
    """Raised by the tests."""


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
        loss = super().training_step(batch, batch_idx)
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


def assert_whole(directory: Path, global_step: int) -> None:
    """The one checkpoint there is of this step, with the state of every parameter."""
    [path] = directory.glob("*.ckpt")
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == global_step
    trainable = [param for param in AwkwardModule().parameters() if param.requires_grad]
    assert len(state["optimizer_states"][0]["state"]) == len(trainable)


@contextlib.contextmanager
def short_grace() -> Iterator[None]:
    """These processes go on to other tests."""
    before, FailureWatch.GRACE_S = FailureWatch.GRACE_S, 0.5
    try:
        yield
    finally:
        FailureWatch.GRACE_S = before


def fit_saving_on_exception(place: str, rank: int | None, sharded: bool, directory: Path) -> str:
    checkpoint = ModelCheckpoint(dirpath=directory, filename="{step}", save_on_exception=True, save_top_k=0)
    with pytest.raises(Exception, match=r"rank [01]"):
        fit_raising(place, rank, sharded, (checkpoint,))
    return "raised"
