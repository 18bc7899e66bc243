"""An exception anywhere, on one rank or on all: nothing hangs, every rank says why, and the next fit works.

The limit of each job is far below the process group's timeout (half an hour), so a rank that waits for it fails.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .fits import AwkwardModule, assert_same_tensors, fit, loader, make_strategy, make_trainer, weights_of
from .rank_processes import Failure, Ranks

BATCH = 3
"""The batch in which things happen: two after the first, so that states exist, and some before the epoch's end."""


class OnPurpose(Exception):
    """What the tests raise."""


# --- where -----------------------------------------------------------------------------------------------------------


def raise_on(module: pl.LightningModule, rank: int | None, batch_idx: int) -> None:
    if batch_idx == BATCH and rank in (None, module.trainer.global_rank):
        raise OnPurpose(f"rank {module.trainer.global_rank}")


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
            self.inputs.weight.requires_grad_(True)
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


class RaisesInData(Dataset[Any]):
    """Sample 14 of the rank's half is broken: it is in batch 3."""

    def __init__(self, rank: int | None) -> None:
        self.data = loader().dataset
        self.rank = rank

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if index // 2 == 14 and self.rank in (None, index % 2):
            raise OnPurpose(f"rank {index % 2}")
        return self.data[index]


PLACES = ["forward", "backward", "on_after_backward", "on_before_optimizer_step", "step", "callback", "data"]


def fit_raising(place: str, rank: int | None, sharded: bool, callbacks: tuple[pl.Callback, ...] = ()) -> pl.Trainer:
    """Fits, and lets the exception out."""
    if place == "callback":
        callbacks = (*callbacks, RaisesInCallback(rank))
    strategy = make_strategy("megatron_ddp", use_distributed_optimizer=sharded)
    saving = bool([callback for callback in callbacks if isinstance(callback, ModelCheckpoint)])
    trainer = make_trainer(strategy, callbacks=list(callbacks), enable_checkpointing=saving)
    data = DataLoader(RaisesInData(rank), batch_size=4) if place == "data" else loader()
    trainer.fit(RaisesIn(place, rank), data)
    return trainer


# --- one rank alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_rank_ends_both_and_the_next_fit_works(ranks: Ranks, place: str, sharded: bool) -> None:
    """Rank 1's process lives on, as a notebook's would: what ends rank 0's wait is that rank 1 gives the group up."""
    waiting, raising = ranks.run(fit_again_after_exception, place, sharded)
    assert raising == "OnPurpose: rank 1"
    assert waiting.startswith("CollectiveError: rank 0 of 2: ")
    assert "another rank ended with an error" in waiting


def fit_again_after_exception(place: str, sharded: bool) -> str:
    try:
        fit_raising(place, 1, sharded)
    except Exception as error:  # noqa: BLE001 - whatever this rank says
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    again = fit("megatron_ddp", strategy_options={"use_distributed_optimizer": sharded})
    expected = fit("ddp")
    assert_same_tensors(again.weights, expected.weights)
    return said


# --- saving on the way out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("place", ["forward", "backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("rank", [None, 1])
def test_a_checkpoint_on_exception_is_whole(
    ranks: Ranks, tmp_path: Path, place: str, rank: int | None, sharded: bool
) -> None:
    """Also if one rank alone raised (under "ddp" that one waits for the others, and they for it): the ranks meet.

    Resumed, training ends where a run without the exception ends.
    """
    directory = tmp_path / "run"
    for outcome in ranks.run(fit_saving_on_exception, place, rank, sharded, directory):
        assert outcome == "raised"
    [path] = directory.glob("*.ckpt")
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == BATCH
    assert len(state["optimizer_states"][0]["state"]) == 10
    resumed = ranks.run(fit_resumed, sharded, path)
    uninterrupted = ranks.run(fit_resumed, sharded, None)
    for mine, other in zip(resumed, uninterrupted, strict=True):
        assert_same_tensors(mine, other)


def fit_saving_on_exception(place: str, rank: int | None, sharded: bool, directory: Path) -> str:
    checkpoint = ModelCheckpoint(dirpath=directory, filename="{step}", save_on_exception=True, save_top_k=0)
    with pytest.raises(Exception, match=r"rank [01]"):
        fit_raising(place, rank, sharded, (checkpoint,))
    return "raised"


def fit_resumed(sharded: bool, path: Path | None) -> dict[str, Tensor]:
    """Both runs skip nothing: the batch that failed is trained again. BatchNorm's counters alone tell of it."""
    module = RaisesIn("nowhere", None)
    strategy = make_strategy("megatron_ddp", use_distributed_optimizer=sharded)
    make_trainer(strategy, max_epochs=1).fit(module, loader(), ckpt_path=path)
    weights = weights_of(module)
    return {name: value for name, value in weights.items() if not name.startswith("norm.")}


def test_a_checkpoint_that_cannot_be_whole_is_not_written(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 raises inside its step, when rank 0 has stepped already: their shards are of different steps."""
    for said in ranks.run(fit_torn, tmp_path / "run"):
        assert "was NOT saved after the exception" in said
        assert "interrupted at different points" in said or "a step was under way" in said
    assert not list((tmp_path / "run").glob("*.ckpt"))


def fit_torn(directory: Path) -> str:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megastrategy").addHandler(handler)
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, save_top_k=0)
    with pytest.raises(Exception, match=r"rank [01]"):
        fit_raising("step", 1, True, (checkpoint,))
    logging.getLogger("megastrategy").removeHandler(handler)
    return "\n".join(said)


# --- signals ---------------------------------------------------------------------------------------------------------


class Interrupts(pl.Callback):
    """Ctrl-C reaches all processes of a terminal's foreground group; here rank 0 alone, or all."""

    def __init__(self, only: int | None) -> None:
        self.only = only

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH and self.only in (None, trainer.global_rank):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("only", [None, 0])
def test_ctrl_c_ends_all_ranks_and_saves(ranks: Ranks, tmp_path: Path, only: int | None) -> None:
    outcomes = ranks.outcomes(fit_with, Interrupts(only), tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["SystemExit", "SystemExit" if only is None else "CollectiveError"]
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
