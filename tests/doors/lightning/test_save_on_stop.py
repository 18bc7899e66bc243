"""``SaveOnStop``: a fit that ends before its time is gone on with from exactly there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megastrategy import SaveOnStop
from megastrategy.core import OpenDirectory

from ..fits import fit
from ..rank_processes import Ranks
from ..stopped_fits import Stopped, fit_until

SIZE = 36  # 6 batches an epoch on 2 ranks


def assert_goes_on(first: list[Stopped], second: list[Stopped], whole: list[Stopped]) -> None:
    """Rank by rank, to the bit."""
    for begun, ended, expected in zip(first, second, whole, strict=True):
        assert begun.saved
        assert begun.step < expected.step
        assert begun.trained + ended.trained == expected.trained
        assert begun.losses + ended.losses == expected.losses
        assert not ended.saved, "it ran to its end"


WAYS: dict[str, dict[str, Any]] = {
    "should_stop": {"batch": 8},
    "at an epoch's end": {"way": "should_stop", "batch": 6},
    "max_steps": {"max_steps": 8},
    "Timer": {},
    "EarlyStopping": {"val_check_interval": 2},
    "SIGTERM": {"batch": 8},
    "Ctrl-C": {"batch": 8},
}
ENDED_BY = {"SIGTERM": "SIGTERMException", "Ctrl-C": "SystemExit"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_goes_on_is_the_fit_that_nobody_stopped(ranks: Ranks, tmp_path: Path, way: str) -> None:
    options = {"way": way, **WAYS[way]}
    rest = {key: value for key, value in options.items() if key not in ("way", "batch", "max_steps")}
    whole = ranks.run(fit_until, SIZE, str(tmp_path / "whole"), name="megatron_ddp", **rest)
    first = ranks.run(fit_until, SIZE, str(tmp_path), name="megatron_ddp", **options)
    assert [part.ended_by for part in first] == [ENDED_BY.get(way)] * 2
    second = ranks.run(fit_until, SIZE, str(tmp_path), name="megatron_ddp", resume=True, **rest)
    assert not (tmp_path / "whole").exists(), "a fit that runs to its end saves nothing"
    assert_goes_on(first, second, whole)


def test_a_stop_waits_for_the_step(ranks: Ranks, tmp_path: Path) -> None:
    """The gradients of half a window are in no checkpoint."""
    options = {"accumulate_grad_batches": 3, "name": "megatron_ddp"}
    whole = ranks.run(fit_until, SIZE, str(tmp_path), **options)
    first = ranks.run(fit_until, SIZE, str(tmp_path), way="should_stop", batch=7, **options)
    second = ranks.run(fit_until, SIZE, str(tmp_path), resume=True, **options)
    assert [len(part.trained) for part in first] == [9, 9]
    assert_goes_on(first, second, whole)


def test_no_minimum_is_cut_short(ranks: Ranks, tmp_path: Path) -> None:
    options = {"min_steps": 11, "name": "megatron_ddp"}
    whole = ranks.run(fit_until, SIZE, str(tmp_path), **options)
    first = ranks.run(fit_until, SIZE, str(tmp_path), way="should_stop", batch=8, **options)
    second = ranks.run(fit_until, SIZE, str(tmp_path), resume=True, **options)
    assert [part.step for part in first] == [11, 11]
    assert_goes_on(first, second, whole)


def test_lightnings_own_checkpoints_are_made_as_ever(tmp_path: Path) -> None:
    trainer = pl.Trainer(callbacks=[SaveOnStop(tmp_path)], default_root_dir=tmp_path, accelerator="cpu", logger=False)
    assert [type(callback) for callback in trainer.checkpoint_callbacks] == [ModelCheckpoint]


@pytest.mark.long
def test_a_stopped_fit_goes_on_under_ddp(ranks: Ranks, tmp_path: Path) -> None:
    """The file is Lightning's; without the sampler's place the epoch begins anew there."""
    first = ranks.run(fit_until, SIZE, str(tmp_path), way="should_stop", batch=8, name="megatron_ddp")
    second = ranks.run(fit_until, SIZE, str(tmp_path), resume=True, name="ddp")
    assert [part.step for part in first] == [8, 8]
    assert [part.trained[0][0] for part in second] == [1, 1]
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=False)["global_step"] == 8


@pytest.mark.parametrize("interrupted", [(0,), (1,), (0, 1)])
def test_ctrl_c_while_a_directory_is_saved_saves_here_too(
    ranks: Ranks, tmp_path: Path, interrupted: tuple[int, ...]
) -> None:
    """On whichever ranks it comes, all end as after Ctrl-C."""
    assert ranks.run(stop_in_a_save, tmp_path, interrupted) == ["SystemExit"] * 2
    # Rank 0 may have completed the other one before it knew.
    assert {"stopped.ckpt"} <= {child.name for child in tmp_path.iterdir()} <= {"stopped.ckpt", "other.ckpt"}
    assert torch.load(tmp_path / "stopped.ckpt" / "meta.pt", weights_only=False)["global_step"] == 4
    assert OpenDirectory(tmp_path / "stopped.ckpt").read("optimizer_0")


def stop_in_a_save(folder: Path, interrupted: tuple[int, ...]) -> str:
    """Ctrl-C comes when this rank's part is on its way to the disk."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        os.fsync = real
        os.kill(os.getpid(), signal.SIGINT)
        real(descriptor)

    class SavesOnce(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                if trainer.global_rank in interrupted:
                    os.fsync = fsync
                trainer.save_checkpoint(folder / "other.ckpt")

    options = {"strategy_options": {"state_dict_type": "sharded"}, "callbacks": [SaveOnStop(folder), SavesOnce()]}
    try:
        fit("megatron_ddp", **options)
    except SystemExit as error:
        return type(error).__name__
    return "ran to its end"
