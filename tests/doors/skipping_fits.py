"""Fits with ``SkipOutlierSteps``, some of whose losses are multiplied; each tells which steps changed the weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from megastrategy import SkipOutlierSteps

from .fits import make_strategy, make_trainer
from .rank_processes import number_of_ranks
from .resumed_fits import Regression


class Spiky(Regression):
    """``factors``: of the losses, by step; ``bad_rank``: the only rank with them, or None for all."""

    def __init__(self, size: int, factors: dict[int, float], bad_rank: int | None) -> None:
        super().__init__(size)
        self.factors, self.bad_rank = factors, bad_rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_bad = self.bad_rank in (None, self.global_rank)
        return loss * self.factors.get(self.trainer.global_step, 1.0) if is_bad else loss


class Watches(pl.Callback):
    """The norms before anything is skipped, and the weights after each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.weights: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.weights.append(self._weights(pl_module))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if hasattr(optimizer, "grad_norm"):
            self.norms.append(float(optimizer.grad_norm()))
        else:
            grads = [param.grad for param in pl_module.parameters() if param.grad is not None]
            self.norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.weights.append(self._weights(pl_module))

    def _weights(self, module: Any) -> Tensor:
        return torch.cat([param.detach().flatten() for param in module.parameters()])


@dataclasses.dataclass
class Skipping:
    """What one rank trained.

    Attributes:
        skipped: the steps that left the weights alone, from 0.
        num_skipped: what the callback says.
        num_updates: what the optimizer's state says.
    """

    norms: list[float]
    skipped: list[int]
    num_skipped: int
    num_updates: int
    weights: Tensor


def fit_skipping(
    name: str,
    factors: dict[int, float],
    *,
    size: int = 36,
    bad_rank: int | None = None,
    save: str | None = None,
    resume: str | None = None,
    strategy_options: dict[str, Any] | None = None,
    rule: dict[str, Any],
    **options: Any,
) -> Skipping:
    module, watches, skipper = Spiky(size, factors, bad_rank), Watches(), SkipOutlierSteps(**rule)
    strategy = make_strategy(name, **strategy_options or {})
    trainer = make_trainer(strategy, callbacks=[watches, skipper], devices=number_of_ranks(), **options)
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    pairs = zip(watches.weights, watches.weights[1:], strict=False)
    skipped = [step for step, (before, after) in enumerate(pairs) if torch.equal(before, after)]
    [optimizer] = trainer.optimizers
    steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()} if name == "ddp" else set()
    return Skipping(watches.norms, skipped, skipper.num_skipped, max(steps, default=0), watches.weights[-1])
