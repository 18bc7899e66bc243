"""Fabric: a loop of one's own instead of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ..fabric_loops import AwkwardNet, Loop, make_data, make_fabric, sgd, state_of, train
from ..fits import weights_of
from ..matrix import Feature

CLIP_NORM = 0.5
CLIP_VALUE = 0.02


def train_sgd(name: str, strategy_options: dict[str, Any], **options: Any) -> Loop:
    """With an optimizer that does not forget a gradient's length, as AdamW does."""
    return train(name, strategy_options, make_optimizer=sgd, **options)


def set_up_apart(name: str, strategy_options: dict[str, Any]) -> Loop:
    fabric = make_fabric(name, strategy_options)
    net = AwkwardNet()
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    losses = []
    for features, tokens, targets in make_data(fabric):
        loss = F.cross_entropy(model(features, tokens), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Loop(weights_of(net), losses, [], state_of(fabric, optimizer))


def clip_by_hand(name: str, strategy_options: dict[str, Any], clip: Callable[..., Any] | None, limit: float) -> Loop:
    """With torch's own functions, as loops do that were written before they had a Fabric."""
    fabric = make_fabric(name, strategy_options)
    net = AwkwardNet()
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    losses = []
    for features, tokens, targets in make_data(fabric):
        loss = F.cross_entropy(model(features, tokens), targets)
        fabric.backward(loss)
        if clip is not None:
            clip(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Loop(weights_of(net), losses, [], state_of(fabric, optimizer))


def compiled(module: nn.Module) -> nn.Module:
    """Dynamo's graphs, without a C++ compiler."""
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


FEATURES = [
    Feature("Fabric", "`setup(model, optimizer)` and a loop", train),
    Feature("Fabric", "`setup_module` and `setup_optimizers` apart", set_up_apart),
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
