"""A fit that is watched: weights, metrics and what a callback kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ..fits import AwkwardModule, Fit, fit

Make = Callable[[], Callback]


@dataclasses.dataclass
class Watched:
    """A fit and what was seen while it ran.

    Attributes:
        fit: what it left behind.
        batches: after every batch: optimizer steps so far, all learning rates, all weights in one tensor.
        notes: what is particular to a feature.
    """

    fit: Fit
    batches: list[tuple[int, list[float], Tensor]]
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


class Watch(Callback):
    """Records what :class:`Watched` holds of every batch; after the callbacks that are given before it."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[float], Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.batches.append((trainer.global_step, rates, flat_weights(pl_module)))


def flat_weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def watched(
    name: str,
    strategy_options: dict[str, Any],
    *,
    callbacks: Sequence[Make | Callback] = (),
    module: Callable[[], pl.LightningModule] = AwkwardModule,
    **trainer_options: Any,
) -> Watched:
    """Fits with these callbacks, and watches."""
    made = [callback if isinstance(callback, Callback) else callback() for callback in callbacks]
    watch = Watch()
    result = fit(name, strategy_options=strategy_options, module=module(), callbacks=[*made, watch], **trainer_options)
    return Watched(result, watch.batches)
