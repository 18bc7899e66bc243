"""Modules that are built late, copied, pickled or changed in mid-fit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from ..fits import NUM_TOKENS, AwkwardModule, Fit, weights_of
from .classifiers import WIDTH, Classifier, Plain, fitted


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


def materialised() -> nn.Module:
    module = Lazy()
    module(torch.zeros(1, 5), torch.zeros(1, dtype=torch.long))
    return module


def copied_after(name: str, strategy_options: dict[str, Any], *, how: Callable[[Any], Any]) -> list[Fit]:
    """The module after a fit, its copy, and both trained on: they share nothing."""
    module = AwkwardModule()
    first = fitted(name, strategy_options, module, max_epochs=1)
    other = how(module)
    second = fitted(name, strategy_options, other, max_epochs=1)
    kept = weights_of(module)
    assert all(torch.equal(kept[key], value) for key, value in first.weights.items()), "the original moved"
    third = fitted(name, strategy_options, module, max_epochs=1)
    return [first, second, third]


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


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

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._repoint("validation end", trainer, pl_module)

    def _repoint(self, hook: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if hook == self.hook and trainer.fit_loop.total_batch_idx % 3 == 0:
            for param in pl_module.parameters():
                param.data = param.data * 0.9


def repointed(name: str, strategy_options: dict[str, Any], *, hook: str) -> Fit:
    return fitted(name, strategy_options, AwkwardModule(), callbacks=[Repoints(hook)])


class LoadsInBetween(Callback):
    """Goes back to the weights of the first batch, in place, in mid-fit."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1:
            self.saved = weights_of(pl_module)
        if batch_idx == 4:
            pl_module.load_state_dict(self.saved)


def loading(name: str, strategy_options: dict[str, Any]) -> Fit:
    return fitted(name, strategy_options, AwkwardModule(), callbacks=[LoadsInBetween()])


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
