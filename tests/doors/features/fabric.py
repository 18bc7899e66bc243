"""Fabric: a loop of one's own instead of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ..fabric_loops import CLIP_NORM, CLIP_VALUE, Loop, set_up, set_up_apart, sgd, train
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
]
