"""The callback that saves where a fit ends before its time.

Imports neither ``lightning.pytorch`` nor ``pytorch_lightning``, whose doors combine it with their own ``Callback``.

[Note: why the state is saved before the epoch ends]
A fit that a Timer, ``should_stop`` or ``max_steps`` ends within an epoch ends the epoch, too: a ModelCheckpoint that
saves at an epoch's end saves one whose epoch is over, and a run that goes on from it leaves out the epoch's rest. One
that saves every so many steps has the last of these. So the state is saved here when the batch has ended, before
Lightning ends the epoch. Its own ``ModelCheckpoint(save_on_exception=True)`` does the same for exceptions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .._checkpoints.directories import existing_directory
from ..core import RemoteDirectory

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StopSaver:
    """Saves a checkpoint of exactly the step at which a fit ends before its time, from which it goes on.

    Those are: ``Timer`` and ``Trainer(max_time=...)``, ``trainer.should_stop`` (``EarlyStopping`` sets it too),
    ``max_steps``, SIGTERM and Ctrl-C. A fit that runs to ``max_epochs`` saves nothing here, nor one that fails, for
    which there is ``ModelCheckpoint(save_on_exception=True)``; Slurm's requeue signal has Lightning's own file.

    With a loader that saves its place, such as torchdata's ``StatefulDataLoader``, a resumed fit is the uninterrupted
    one to the bit, except that Ctrl-C leaves out the batch that it interrupts. Where gradients are accumulated over
    batches a stop waits for the step, since gradients are in no checkpoint; SIGTERM does not wait, and loses them.

    Args:
        dirpath: the folder, on every rank the same; a URL that fsspec knows will do. It is made when something is
            saved.
        filename: in it; a later stop replaces an earlier one. A sharded checkpoint in an object store is removed first.

    Attributes:
        path: the file, or folder of a sharded checkpoint, for ``Trainer.fit(ckpt_path=...)``. Remove it when you start
            anew.
    """

    _sigterm_exception: ClassVar[type[BaseException]]
    """The package's own; set by the class that is made from this one."""

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "stopped.ckpt") -> None:
        # pathlib would make one slash of two
        is_url = "://" in str(dirpath)
        self.path = f"{str(dirpath).rstrip('/')}/{filename}" if is_url else Path(dirpath) / filename
        self._step_before = -1  # this batch
        self._saved_step = -1
        self._waits_for_step = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Last, so that other callbacks have stopped the fit when a batch has ended. Lightning's Checkpoint would be
        # last, and a Trainer with one makes no ModelCheckpoint. A new list, since Lightning iterates over this one.
        trainer.callbacks = [*(other for other in trainer.callbacks if other is not self), self]  # type: ignore[attr-defined]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._waits_for_step:
            trainer.should_stop = True
        if self._is_within_window(trainer, pl_module):
            self._waits_for_step = trainer.should_stop
            trainer.should_stop = False
            return
        self._waits_for_step = False
        if _stops(trainer) or 0 <= trainer.max_steps <= trainer.global_step:
            self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves if a validation within an epoch stops the fit; the epoch's last validation has a later hook, too."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and _stops(trainer):
            if self._is_within_window(trainer, pl_module):
                self._waits_for_step = True
                trainer.should_stop = False
            else:
                self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _stops(trainer):
            self._save(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        is_asked_for = isinstance(exception, KeyboardInterrupt | self._sigterm_exception)
        if is_asked_for and trainer.state.fn == "fit" and self._step_before >= 0:
            self._save(trainer)

    def _is_within_window(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Whether gradients are accumulated that no step has taken; unknown where the user's code steps."""
        return pl_module.automatic_optimization and trainer.global_step == self._step_before

    def _save(self, trainer: pl.Trainer) -> None:
        if self._saved_step == trainer.global_step or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if isinstance(existing_directory(self.path), RemoteDirectory):
            trainer.strategy.remove_checkpoint(self.path)  # directories in a store are never overwritten
        trainer.save_checkpoint(self.path)
        self._saved_step = trainer.global_step


def _stops(trainer: pl.Trainer) -> bool:
    """Whether the Trainer should stop, and does, since no minimum of epochs or steps is left."""
    min_epochs = trainer.min_epochs or 0
    min_steps = trainer.min_steps or 0
    return trainer.should_stop and trainer.current_epoch >= min_epochs and trainer.global_step >= min_steps
