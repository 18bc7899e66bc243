"""Gradient clipping wherever Lightning lets a user ask for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.optim import Optimizer

from ..fits import AwkwardModule, Fit, fit
from ..matrix import Feature

CLIP_NORM = 0.5
CLIP_VALUE = 0.02


def sgd(params: Any) -> Optimizer:
    """Not AdamW, which forgets a gradient's length."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class Clipped(AwkwardModule):
    """``on_train_batch_end`` notes a weight, so that a step of another length shows at once."""

    def __init__(self) -> None:
        super().__init__(optimizer=sgd)
        self.trace: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.trace.append(self.scale.item())


class ClipsOddBatches(Clipped):
    """Overrides the hook as Lightning's documentation shows: now and then, through ``self.clip_gradients``."""

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.global_step % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=CLIP_VALUE, gradient_clip_algorithm="value")


class ClipsWithTheOptimizer(Clipped):
    """Under "ddp" with torch's function, which reads ``.grad``; under ours with the optimizer's own."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(CLIP_NORM)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)


class ClippedByHand(Clipped):
    """Manual optimization: each of two optimizers clipped with its own value after its own backward."""

    algorithm = "value"
    clip_vals = (CLIP_VALUE, CLIP_VALUE / 4)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        features, tokens, targets = batch
        for optimizer, clip_val in zip(self.optimizers(), self.clip_vals, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(self(features, tokens), targets)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=clip_val, gradient_clip_algorithm=self.algorithm)
            optimizer.step()
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        trunk = [*self.inputs.parameters(), *self.norm.parameters()]
        rest = [*self.side.parameters(), *self.out.parameters(), *self.embed.parameters(), self.scale]
        return sgd(trunk), sgd(rest)


class ClippedByHandByNorm(ClippedByHand):
    algorithm = "norm"
    clip_vals = (CLIP_NORM, CLIP_NORM / 4)


def clipped(
    name: str, strategy_options: dict[str, Any], kind: type[Clipped] = Clipped, **options: Any
) -> tuple[Fit, list[float]]:
    """The fit, and a weight after every batch."""
    module = kind()
    result = fit(name, strategy_options=strategy_options, module=module, max_epochs=1, **options)
    return result, module.trace


def by(algorithm: str, **options: Any) -> dict[str, Any]:
    clip_val = CLIP_NORM if algorithm == "norm" else CLIP_VALUE
    return {"gradient_clip_val": clip_val, "gradient_clip_algorithm": algorithm, **options}


NORM = "the norm is summed by shards"

FEATURES = [
    Feature("Clipping", "by value", clipped, by("value")),
    Feature("Clipping", "by norm", clipped, by("norm"), rtol=1e-6, note=NORM),
    Feature("Clipping", "by norm, accumulated", clipped, by("norm", accumulate_grad_batches=3), rtol=1e-6, note=NORM),
    Feature(
        "Clipping",
        "configure_gradient_clipping with self.clip_gradients",
        clipped,
        {"kind": ClipsOddBatches},
    ),
    Feature(
        "Clipping",
        "configure_gradient_clipping with optimizer.clip_grad_norm_",
        clipped,
        {"kind": ClipsWithTheOptimizer},
        rtol=1e-6,
        note='under `"ddp"` with `torch.nn.utils.clip_grad_norm_`; with reduce-scatter that is refused',
    ),
    Feature("Clipping", "manual, per optimizer, by value", clipped, {"kind": ClippedByHand}),
    Feature("Clipping", "manual, per optimizer, by norm", clipped, {"kind": ClippedByHandByNorm}, rtol=1e-6, note=NORM),
]
