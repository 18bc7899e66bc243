"""Modules to classify with, and fits of them, as features of the areas below need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..fits import NUM_TOKENS, Fit, fit, weights_of

WIDTH = 9

Net = Callable[[Tensor, Tensor], Tensor]


class Classifier(pl.LightningModule):
    """Trains any module that makes logits from features (batch, 5) and tokens (batch,).

    Args:
        build: makes the module.
        optimizer: makes the optimizer from the parameters.
    """

    def __init__(
        self, build: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = build()
        self.make_optimizer = optimizer
        self.losses: list[float] = []

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.net(features, tokens)

    def loss(self, batch: Any) -> Tensor:
        features, tokens, targets = batch
        return F.cross_entropy(self(features, tokens), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer([param for param in self.parameters() if param.requires_grad])


def trained(
    name: str,
    strategy_options: dict[str, Any],
    *,
    build: Callable[[], nn.Module],
    all_used: bool = False,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    **trainer_options: Any,
) -> Fit:
    """A fit of a Classifier. ``all_used``: "ddp" looks for no unused parameters, which it cannot with re-entrant
    checkpoints."""
    return fitted(name, strategy_options, Classifier(build, optimizer), all_used, **trainer_options)


def fitted(
    name: str, strategy_options: dict[str, Any], module: pl.LightningModule, all_used: bool = False, **options: Any
) -> Fit:
    if name == "ddp" and all_used:
        strategy_options = {"find_unused_parameters": False, **strategy_options}
    before = weights_of(module)
    result = fit(name, strategy_options=strategy_options, module=module, **options)
    moved = [key for key in before if key in result.weights and not torch.equal(before[key], result.weights[key])]
    assert len(moved) >= len(before) // 3 or not before, "hardly anything was trained"
    return result


def wrap_again(trainer: pl.Trainer) -> None:
    """A user of "ddp" would have to do this when the set of trained parameters changes: only test references do."""
    strategy: Any = trainer.strategy
    strategy.model = None  # the wrapper that is there takes its hooks along
    strategy.model = strategy._setup_model(trainer.lightning_module)


# --- compiled --------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.out(self.block(features))
