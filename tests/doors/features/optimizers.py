"""Optimizers with modes, as Schedule-Free's, whose ``train()`` and ``eval()`` move the weights; and those that need
whole parameters."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.support.optimizers import MatricesAndRest, Shampoo
from tests.support.optimizers_with_methods import ScheduleFree

from ..fabric_loops import EPOCHS, set_up
from ..fits import AwkwardModule, Fit, fit, weights_of
from ..matrix import Feature


def schedule_free(params: Any) -> torch.optim.Optimizer:
    """The state of trained parameters: torch DDP keeps an empty state for a frozen one that was looked up."""
    return ScheduleFree([param for param in params if param.requires_grad], lr=0.02, weight_decay=0.01)


class Modes(AwkwardModule):
    """Switches the modes in the hooks that Schedule-Free's documentation names; begins in evaluation."""

    def __init__(self) -> None:
        super().__init__(optimizer=schedule_free)
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.train()

    def on_validation_start(self) -> None:
        optimizer: Any = self.optimizers()
        self.seen.append(weights_of(self))
        optimizer.eval()
        self.seen.append(weights_of(self))


def fit_with_modes(name: str, strategy_options: dict[str, Any], **trainer_options: Any) -> list[Any]:
    """Two epochs, each saved in evaluation; then a third from the file, by a new Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        saver = ModelCheckpoint(dirpath=folder)
        first, second = Modes(), Modes()
        options = {"strategy_options": strategy_options, "enable_checkpointing": True, **trainer_options}
        fits: list[Fit] = [fit(name, module=first, callbacks=[saver], **options)]
        saved = torch.load(saver.best_model_path, weights_only=False)
        resumed = {**options, "max_epochs": 3, "ckpt_path": saver.best_model_path}
        fits.append(fit(name, module=second, callbacks=[ModelCheckpoint(dirpath=folder)], **resumed))
    assert any(not torch.equal(a, b) for a, b in zip(*map(dict.values, first.seen[-2:]), strict=True))
    state = saved["optimizer_states"][0]
    assert state["param_groups"][0]["train_mode"] is False
    assert any("z" in values for values in state["state"].values())
    return [fits, first.seen, second.seen, saved["state_dict"], dict(sorted(state["state"].items()))]


def loop_with_modes(name: str, strategy_options: dict[str, Any]) -> list[Any]:
    trainee = set_up(name, strategy_options, schedule_free)
    seen = []
    for _ in range(EPOCHS):
        trainee.optimizer.train()
        seen.append(weights_of(trainee.net))
        trainee.train()
        trainee.optimizer.eval()
        seen.append(weights_of(trainee.net))
    return [trainee.end(), seen]


def whole_or_not(params: Any) -> torch.optim.Optimizer:
    """Matrices by one recipe, which needs them whole, and the rest by another, in one optimizer."""
    trained = [param for param in params if param.requires_grad]
    matrices = [param for param in trained if param.dim() > 1]
    return MatricesAndRest([{"params": matrices, "by_row": True}, {"params": [p for p in trained if p.dim() < 2]}])


def adafactor(params: Any) -> torch.optim.Optimizer:
    """Keeps a number for each row and each column."""
    return torch.optim.Adafactor([param for param in params if param.requires_grad], lr=0.02)


def shampoo(params: Any) -> torch.optim.Optimizer:
    """Keeps lists of factors."""
    return Shampoo([param for param in params if param.requires_grad], lr=0.02)


def fit_and_resume(name: str, strategy_options: dict[str, Any], make: Any, **trainer_options: Any) -> list[Any]:
    """Two epochs, saved; then a third from the file, by a new Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        saver = ModelCheckpoint(dirpath=folder)
        options = {"strategy_options": strategy_options, "enable_checkpointing": True, **trainer_options}
        fits = [fit(name, module=AwkwardModule(optimizer=make), callbacks=[saver], **options)]
        saved = torch.load(saver.best_model_path, weights_only=False)
        resumed = {**options, "max_epochs": 3, "ckpt_path": saver.best_model_path}
        again = ModelCheckpoint(dirpath=folder)
        fits.append(fit(name, module=AwkwardModule(optimizer=make), callbacks=[again], **resumed))
    state = dict(sorted(saved["optimizer_states"][0]["state"].items()))
    assert state
    return [fits, saved["state_dict"], state]


def loop_with(name: str, strategy_options: dict[str, Any], make: Any) -> list[Any]:
    trainee = set_up(name, strategy_options, make)
    trainee.train()
    return [trainee.train()]


RESUMED: dict[str, Callable[..., Any]] = {
    "matrices by one recipe, the rest by another, saved and resumed": whole_or_not,
    "Adafactor, saved and resumed": adafactor,
    "Shampoo, whose state is lists, saved and resumed": shampoo,
}
LOOPS: dict[str, Callable[..., Any]] = {
    "matrices by one recipe, the rest by another, in a loop with Fabric": whole_or_not,
    "Adafactor in a loop with Fabric": adafactor,
}
FEATURES = [
    Feature(
        "Optimizers with modes", "Schedule-Free's `train()` and `eval()` in hooks, saved and resumed", fit_with_modes
    ),
    Feature("Optimizers with modes", "Schedule-Free's `train()` and `eval()` in a loop with Fabric", loop_with_modes),
    *(
        Feature("Whole parameters", about, functools.partial(fit_and_resume, make=make))
        for about, make in RESUMED.items()
    ),
    *(Feature("Whole parameters", about, functools.partial(loop_with, make=make)) for about, make in LOOPS.items()),
]
