"""Fits that save, and a checkpoint to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from .fits import BATCHES_PER_EPOCH, fit

STATE = {"weight": torch.arange(300_000, dtype=torch.float32), "step": 1}
"""1.2 MB: many writes of a buffered file."""


def saver(folder: Path, **options: Any) -> ModelCheckpoint:
    defaults: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": BATCHES_PER_EPOCH, "save_top_k": -1}
    return ModelCheckpoint(folder, **{**defaults, "save_on_train_epoch_end": False, **options})


def fit_saving(folder: Path, plugins: tuple[Any, ...] = ()) -> None:
    fit("megatron_ddp", callbacks=[saver(folder)], enable_checkpointing=True, plugins=list(plugins))
