"""Fabric, a loop instead of a Trainer; optimizers with modes, as Schedule-Free's, and with whole parameters."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.support.optimizers import MatricesAndRest, Shampoo
from tests.support.optimizers_with_methods import ScheduleFree
from tests.support.whole_params import replicated_and_flat_groups

from ..fabric_loops import CLIP_NORM, CLIP_VALUE, EPOCHS, Loop, set_up, set_up_apart, sgd, train
from ..fits import AwkwardModule, Fit, fit, weights_of
from ..matrix import Feature


def train_sgd(name: str, strategy_options: dict[str, Any], **options: Any) -> Loop:
    """With an optimizer that does not forget a gradient's length, as AdamW does."""
    return train(name, strategy_options, make_optimizer=sgd, **options)


def train_set_up_apart(name: str, strategy_options: dict[str, Any]) -> Loop:
    return set_up_apart(name, strategy_options).train()


def clip_by_hand(name: str, strategy_options: dict[str, Any], clip: Callable[..., Any], limit: float) -> Loop:
    """With torch's own functions, as loops do that were written before they had a Fabric."""
    trainee = set_up(name, strategy_options)
    return trainee.train(before_step=lambda: clip(trainee.model.parameters(), limit))


def compiled(module: nn.Module) -> nn.Module:
    """Dynamo's graphs, without a C++ compiler."""
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


# --- optimizers ------------------------------------------------------------------------------------------------------


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


def shampoo(params: Any) -> torch.optim.Optimizer:
    """Keeps lists of factors."""
    return Shampoo([param for param in params if param.requires_grad], lr=0.02)


def replicated_and_flat(params: Any) -> torch.optim.Optimizer:
    """One group is normalised by all of its gradients: every rank steps it."""
    return replicated_and_flat_groups([param for param in params if param.requires_grad])


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
    "Shampoo, whose state is lists, saved and resumed": shampoo,
    'a group with `sharding="replicated"`, saved and resumed': replicated_and_flat,
}
LOOPS: dict[str, Callable[..., Any]] = {
    "matrices by one recipe, the rest by another, in a loop with Fabric": whole_or_not,
    'a group with `sharding="replicated"`, in a loop with Fabric': replicated_and_flat,
}
FEATURES = [
    Feature("Fabric", "`setup(model, optimizer)` and a loop", train),
    Feature("Fabric", "`setup_module` and `setup_optimizers` apart", train_set_up_apart),
    Feature("Fabric", "`no_backward_sync`, short last window", train, {"accumulate": 3}),
    Feature("Fabric", "`clip_gradients` by value", train_sgd, {"clip": {"clip_val": CLIP_VALUE}}),
    Feature(
        "Fabric",
        "`clip_gradients` by norm",
        train_sgd,
        {"clip": {"max_norm": CLIP_NORM}},
        rtol=1e-6,
        note="the norm is summed by shards",
    ),
    Feature(
        "Fabric",
        "`torch.nn.utils.clip_grad_norm_` by hand",
        clip_by_hand,
        {"clip": clip_grad_norm_, "limit": CLIP_NORM},
        refused="which was reduce-scattered",
        often=True,
        note="`fabric.clip_gradients(..., max_norm=...)` clips in every mode",
    ),
    Feature(
        "Fabric",
        "`torch.nn.utils.clip_grad_value_` by hand",
        clip_by_hand,
        {"clip": clip_grad_value_, "limit": CLIP_VALUE},
        refused="which was reduce-scattered",
        note="`fabric.clip_gradients(..., clip_val=...)` clips in every mode",
    ),
    Feature("Fabric", '`precision="bf16-mixed"`', train, {"precision": "bf16-mixed"}),
    Feature("Fabric", '`precision="64-true"`', train, {"precision": "64-true"}),
    Feature("Fabric", "`torch.compile` before `setup`", train, {"before_setup": compiled}),
    Feature("Fabric", "`torch.compile` after `setup`", train, {"after_setup": compiled, "accumulate": 2}),
    Feature(
        "Optimizers with modes", "Schedule-Free's `train()` and `eval()` in hooks, saved and resumed", fit_with_modes
    ),
    Feature("Optimizers with modes", "Schedule-Free's `train()` and `eval()` in a loop with Fabric", loop_with_modes),
    *(
        Feature("Whole parameters", about, functools.partial(fit_and_resume, make=make), often=make is not shampoo)
        for about, make in RESUMED.items()
    ),
    *(Feature("Whole parameters", about, functools.partial(loop_with, make=make)) for about, make in LOOPS.items()),
]
