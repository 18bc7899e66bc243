"""Fits that are stopped before their time, with ``SaveOnStop``, and what they trained until then."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megastrategy import SaveOnStop

from .fits import make_strategy, make_trainer
from .rank_processes import number_of_ranks
from .resumed_fits import Regression, Trained


@dataclasses.dataclass
class Stopped:
    """What one rank trained.

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
