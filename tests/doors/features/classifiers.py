"""Modules to classify with, and fits of them; modules that are built late, copied or changed in mid-fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from ..fits import NUM_TOKENS, AwkwardModule, Fit, fit, weights_of

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


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.out(self.block(features))


# --- changed modules -------------------------------------------------------------------------------------------------


class BuiltLate(Classifier):
    """Its layers exist from ``configure_model`` on."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            torch.manual_seed(0)
            self.net = Plain()


def built_late(name: str, strategy_options: dict[str, Any]) -> Fit:
    result = fitted(name, strategy_options, BuiltLate())
    assert "net.out.weight" in result.weights
    return result


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(NUM_TOKENS))

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.block(features)


class CopyInBetween(Callback):
    """Copies the module in mid-fit and trains the copy by hand: gradients and weights of the fit must not notice."""

    def __init__(self) -> None:
        self.copies: list[dict[str, Tensor]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 3:
            return
        other: Any = copy.deepcopy(pl_module)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        features, tokens, targets = batch
        F.cross_entropy(other(features, tokens), targets).backward()
        optimizer.step()
        self.copies.append(weights_of(other))


def copied_during(name: str, strategy_options: dict[str, Any]) -> tuple[Fit, list[dict[str, Tensor]]]:
    copier = CopyInBetween()
    result = fitted(name, strategy_options, AwkwardModule(), callbacks=[copier], accumulate_grad_batches=2)
    assert len(copier.copies) == 2 * 3
    return result, copier.copies


class Repoints(Callback):
    """Gives parameters other memory, the same values on both ranks, in one of the hooks."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._repoint("batch end", trainer, pl_module)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._repoint("after backward", trainer, pl_module)

    def _repoint(self, hook: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if hook == self.hook and trainer.fit_loop.total_batch_idx % 3 == 0:
            for param in pl_module.parameters():
                param.data = param.data * 0.9


def repointed(name: str, strategy_options: dict[str, Any], *, hook: str) -> Fit:
    return fitted(name, strategy_options, AwkwardModule(), callbacks=[Repoints(hook)])


class Freezes(Callback):
    """Freezes a layer after three batches, and (``thaws``) lets it train again after three more."""

    def __init__(self, thaws: bool) -> None:
        self.thaws = thaws
        self.frozen: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == 3:
            pl_module.out.requires_grad_(False)
        if step == 6 and self.thaws:
            pl_module.out.requires_grad_(True)
        self.frozen.append(pl_module.out.weight.detach().clone())


def freezing(name: str, strategy_options: dict[str, Any], *, thaws: bool) -> tuple[Fit, list[Tensor]]:
    """A parameter that was trainable at the start stops, and perhaps starts again: "ddp" allows for that."""
    callback = Freezes(thaws)
    result = fitted(name, strategy_options, AwkwardModule(), callbacks=[callback])
    seen = callback.frozen
    assert torch.equal(seen[3], seen[5])
    assert torch.equal(seen[5], seen[-1]) != thaws
    return result, seen


class HeadLater(Classifier):
    """One layer gets gradients from the start and joins the optimizer, in a group of its own, in mid-fit."""

    def __init__(self) -> None:
        super().__init__(Plain)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.block.parameters(), lr=1e-2)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 4:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net.out.parameters()), "lr": 3e-3})


def joining(name: str, strategy_options: dict[str, Any]) -> Fit:
    module = HeadLater()
    before = module.net.out.weight.detach().clone()
    result = fitted(name, strategy_options, module)
    assert not torch.equal(result.weights["net.out.weight"], before), "the new group was never stepped"
    return result
