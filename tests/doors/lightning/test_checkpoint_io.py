"""Strategies save and load whole files, unless the user gave another way to."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from megastrategy._lightning.checkpoint_io import CompleteFileIO

from ..fits import BATCHES_PER_EPOCH, STATE, assert_same_tensors, fit, fit_saving, make_strategy, saver
from ..rank_processes import Failure, Ranks


@pytest.mark.parametrize("door", ["lightning", "pytorch_lightning", "fabric", "lightning_fabric"])
def test_strategies_save_and_load_with_it_unless_the_user_gave_another(door: str, tmp_path: Path) -> None:
    strategy_class: Any = getattr(__import__(f"megastrategy.{door}", fromlist=["x"]), "MegatronDDPStrategy")  # noqa: B009
    mirrors = "lightning_fabric" if door in ("pytorch_lightning", "lightning_fabric") else "lightning.fabric"
    lightnings = __import__(f"{mirrors}.plugins", fromlist=["x"]).TorchCheckpointIO
    io = strategy_class().checkpoint_io
    assert isinstance(io, CompleteFileIO)
    assert isinstance(io, lightnings)
    assert not isinstance(strategy_class(checkpoint_io=lightnings()).checkpoint_io, CompleteFileIO)
    for path in (tmp_path / "a" / "last.ckpt", f"file://{tmp_path}/b/last.ckpt", "memory://c/last.ckpt"):
        io.save_checkpoint(STATE, path)
        assert torch.equal(io.load_checkpoint(path)["weight"], STATE["weight"])  # type: ignore[arg-type]
        io.remove_checkpoint(path)
        with pytest.raises(FileNotFoundError, match=r"not found: .*last\.ckpt"):
            io.load_checkpoint(path)


def test_wrappers_wrap_it() -> None:
    """``AsyncCheckpointIO()`` takes the strategy's default; one that was given its own keeps it."""
    own: CheckpointIO = TorchCheckpointIO()
    for outer, expected in ((AsyncCheckpointIO(), CompleteFileIO), (AsyncCheckpointIO(own), TorchCheckpointIO)):
        strategy = make_strategy("megatron_ddp", checkpoint_io=outer)
        assert strategy.checkpoint_io is outer
        assert isinstance(outer.checkpoint_io, expected)
    assert outer.checkpoint_io is own


def test_an_asynchronous_save_writes_the_same(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(fit_saving, tmp_path / "sync")
    ranks.run(fit_saving, tmp_path / "async", (AsyncCheckpointIO(),))
    for step in (7, 14):
        ours, theirs = (
            torch.load(tmp_path / kind / f"step={step}.ckpt", weights_only=True) for kind in ("async", "sync")
        )
        assert_same_tensors(ours["state_dict"], theirs["state_dict"])
        states = (found["optimizer_states"][0]["state"] for found in (ours, theirs))
        for mine, expected in zip(*(state.values() for state in states), strict=True):
            assert_same_tensors(mine, expected)
    assert sorted(os.listdir(tmp_path / "async")) == ["step=14.ckpt", "step=7.ckpt"]


class FillsTheDisk(pl.Callback):
    """Rank 0's disk, before the second checkpoint is saved."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == BATCHES_PER_EPOCH + 1 and trainer.global_rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # this process ends with the fit


def test_a_fit_whose_disk_is_full_ends_on_all_ranks_and_says_why(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.outcomes(fit_filling_the_disk, tmp_path)
    full, waiting = outcomes
    assert isinstance(full, Failure)
    assert isinstance(waiting, Failure)
    assert full.kind == "OSError"
    assert str(tmp_path / "step=14.ckpt") in full.message
    assert "was not saved (File too large)" in full.message
    assert waiting.seconds < 30
    assert os.listdir(tmp_path) == ["step=7.ckpt"]
    assert torch.load(tmp_path / "step=7.ckpt", weights_only=True)["global_step"] == BATCHES_PER_EPOCH


def fit_filling_the_disk(folder: Path) -> None:
    fit("megatron_ddp", callbacks=[saver(folder), FillsTheDisk()], enable_checkpointing=True)
