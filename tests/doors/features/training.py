"""Plain fits: accumulation, validation between, several epochs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from ..fits import Fit, fit
from ..matrix import Feature


def plain(name: str, strategy_options: dict[str, Any], **trainer_options: Any) -> Fit:
    return fit(name, strategy_options=strategy_options, **trainer_options)


class StartsAnew(pl.Callback):
    """Replaces the optimizer in mid-training."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.1, momentum=0.9)]


def starting_anew(name: str, strategy_options: dict[str, Any]) -> Fit:
    return fit(name, strategy_options=strategy_options, callbacks=[StartsAnew()])


FEATURES = [
    Feature("Training", "fit with validation", plain),
    Feature("Training", "accumulate_grad_batches, short last window", plain, {"accumulate_grad_batches": 3}),
    Feature("Training", "`trainer.optimizers = [...]` after an epoch", starting_anew),
]
