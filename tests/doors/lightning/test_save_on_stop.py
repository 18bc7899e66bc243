"""``SaveOnStop``: a fit that ends before its time is gone on with from exactly there."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megastrategy import SaveOnStop

from ..fits import make_strategy, make_trainer
from ..rank_processes import Ranks, number_of_ranks
from ..resumed_fits import Regression, Trained


@dataclasses.dataclass
class Stopped:
    """The training of one rank.

    Attributes:
        ended_by: the kind of the exception, if one ended it.
        step: the Trainer's count of steps at the end.
        saved: whether this fit wrote the file.
    """

    trained: Trained
    losses: list[float]
    ended_by: str | None
    step: int
    saved: bool


class StopsAfter(pl.Callback):
    """Stops the fit in the end of a batch, or (Ctrl-C) between two."""

    def __init__(self, batch: int, way: str) -> None:
        self.batch, self.way = batch, way

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        is_it = len(pl_module.trained) == self.batch
        if is_it and self.way == "should_stop":
            trainer.should_stop = True
        if is_it and self.way == "SIGTERM" and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.way == "Timer":
            time.sleep(0.02)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if len(pl_module.trained) == self.batch and self.way == "Ctrl-C":
            raise KeyboardInterrupt


class Falling(Regression):
    """Logs in validation what does not get better."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0, batch_size=1)


def fit_until(
    size: int, folder: str, *, way: str = "", batch: int = 0, resume: bool = False, name: str, **options: Any
) -> Stopped:
    """Fits until ``batch`` batches are trained and one way to stop has stopped it; to its end if there is none."""
    module, saver = Falling(size), SaveOnStop(folder)
    ways: dict[str, list[pl.Callback]] = {
        "Timer": [StopsAfter(batch, way), Timer(timedelta(seconds=0.15))],
        "EarlyStopping": [EarlyStopping("val_loss", patience=1)],
        "max_steps": [],
        "": [],
    }
    options = {"devices": number_of_ranks(), "num_sanity_val_steps": 0, "max_epochs": 3, **options}
    trainer = make_trainer(make_strategy(name), callbacks=[saver, *ways.get(way, [StopsAfter(batch, way)])], **options)
    before = saver.path.stat().st_mtime_ns if saver.path.exists() else 0
    ended_by = None
    try:
        trainer.fit(module, ckpt_path=str(saver.path) if resume else None)
    except (SystemExit, SIGTERMException) as exception:
        ended_by = type(exception).__name__
    saved = saver.path.exists() and saver.path.stat().st_mtime_ns != before
    return Stopped(module.trained, module.losses, ended_by, trainer.global_step, saved)


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
}
ENDED_BY = {"SIGTERM": "SIGTERMException"}


@pytest.mark.sample(1)
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


def test_ctrl_c_leaves_out_the_batch_it_interrupts(ranks: Ranks, tmp_path: Path) -> None:
    """The loader has handed it over, and no step has taken it."""
    whole = ranks.run(fit_until, SIZE, str(tmp_path / "whole"), name="megatron_ddp")
    first = ranks.run(fit_until, SIZE, str(tmp_path), way="Ctrl-C", batch=8, name="megatron_ddp")
    second = ranks.run(fit_until, SIZE, str(tmp_path), resume=True, name="megatron_ddp")
    for begun, ended, expected in zip(first, second, whole, strict=True):
        assert begun.saved
        assert begun.ended_by == "SystemExit"
        assert begun.trained + expected.trained[8:9] + ended.trained == expected.trained


def test_a_stop_waits_for_the_step(ranks: Ranks, tmp_path: Path) -> None:
    """The gradients of half a window are in no checkpoint."""
    options = {"accumulate_grad_batches": 3, "name": "megatron_ddp"}
    whole = ranks.run(fit_until, SIZE, str(tmp_path), **options)
    first = ranks.run(fit_until, SIZE, str(tmp_path), way="should_stop", batch=7, **options)
    second = ranks.run(fit_until, SIZE, str(tmp_path), resume=True, **options)
    assert [len(part.trained) for part in first] == [9, 9]
    assert_goes_on(first, second, whole)
