"""Optimizers with modes, as Schedule-Free's: ``train()`` and ``eval()`` move the weights."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F

from tests.support.optimizers_with_methods import ScheduleFree

from ..fabric_loops import EPOCHS, AwkwardNet, Loop, make_data, make_fabric, state_of
from ..fits import AwkwardModule, Fit, fit, weights_of
from ..matrix import Feature


def schedule_free(params: Any) -> torch.optim.Optimizer:
    """Of those that train: torch DDP keeps an empty state for a frozen one that was looked up."""
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
    """Two epochs, of which each is saved in evaluation; then a third from the file, by a new Trainer."""
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
    fabric = make_fabric(name, strategy_options)
    data = make_data(fabric)
    net = AwkwardNet()
    model, optimizer = fabric.setup(net, schedule_free(net.parameters()))
    losses, seen = [], []
    for _ in range(EPOCHS):
        optimizer.train()
        seen.append(weights_of(net))
        for features, tokens, targets in data:
            loss = F.cross_entropy(model(features, tokens), targets)
            fabric.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        seen.append(weights_of(net))
    return [Loop(weights_of(net), losses, [], state_of(fabric, optimizer)), seen]


FEATURES = [
    Feature(
        "Optimizers with modes", "Schedule-Free's `train()` and `eval()` in hooks, saved and resumed", fit_with_modes
    ),
    Feature("Optimizers with modes", "Schedule-Free's `train()` and `eval()` in a loop with Fabric", loop_with_modes),
]
