"""The callback that skips optimizer steps whose gradients are outliers.

Imports neither ``lightning.pytorch`` nor ``pytorch_lightning``, whose doors put it in front of their ``Callback``.

[Note: why ranks agree]
The decision depends only on the norm, which has the same bits on every rank: partial norms are gathered, and every
rank adds them in the same order. So ranks decide alike without another message, and with the same history for good.

[Note: a step without gradients]
Lightning's loop has no word for a step that is not taken. The gradients are dropped instead, and an optimizer leaves a
parameter without one alone, with its state: clipping then scales nothing, and ``step`` changes nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StepSkipper:
    """Skips an optimizer step where the norm of the gradients is too large, or an outlier.

    A step is skipped where the total norm of the optimizer's reduced gradients, before clipping, is over ``max_norm``;
    where it is over the mean of the norms before it by more than ``sigmas`` standard deviations; or where it is not
    finite. All ranks decide alike. The batch counts as a step for the Trainer, its schedulers and its callbacks.

    Each step costs a pass over this rank's gradients, a small collective, and a wait for the device. In a loop of your
    own it is a line: ``if optimizer.grad_norm() <= limit: optimizer.step()``.

    Source: the rule of OLMo-core's SkipStepOptimizer (Allen Institute for AI), which has it for the loss as well.

    Args:
        max_norm: None for none.
        sigmas: None for no comparison with others.
        window: the number of norms that are remembered, of steps that were skipped, too, so that a level that stays is
            got used to. One that is far out widens the limit until it is forgotten: give ``max_norm``, too. Before half
            of them are known no norm is an outlier.

    Attributes:
        num_skipped: steps of all optimizers, in all fits; in checkpoints, as the norms are.
    """

    _misconfiguration: type[Exception]
    """The package's own; set by the class that is made from this one."""

    def __init__(self, max_norm: float | None = None, *, sigmas: float | None = 6.0, window: int = 128) -> None:
        for name, value in (("max_norm", max_norm), ("sigmas", sigmas)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: give a positive number, or None")
        if window < 4:
            raise ValueError(f"window={window}: a deviation of fewer than 2 norms says nothing; give at least 4")
        self._max_norm, self._sigmas, self._window = max_norm, sigmas, window
        self._norms: dict[int, deque[float]] = {}  # by the optimizer's place
        self.num_skipped = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not pl_module.automatic_optimization:
            raise self._misconfiguration(
                "SkipOutlierSteps: this module steps its optimizers itself (automatic_optimization=False), so it "
                "decides itself: `if optimizer.grad_norm() <= limit: optimizer.step()`"
            )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        place = [id(other) for other in trainer.optimizers].index(id(optimizer))
        norm = _norm(optimizer)
        norms = self._norms.setdefault(place, deque(maxlen=self._window))
        if not norm <= self._limit(norms):  # a norm that is not a number is over every limit
            optimizer.zero_grad()
            self.num_skipped += 1
        if math.isfinite(norm):
            norms.append(norm)

    def _limit(self, norms: deque[float]) -> float:
        limit = math.nextafter(math.inf, 0) if self._max_norm is None else self._max_norm
        if self._sigmas is not None and len(norms) >= self._window // 2:
            limit = min(limit, statistics.fmean(norms) + self._sigmas * statistics.stdev(norms))
        return limit

    def state_dict(self) -> dict[str, Any]:
        return {"norms": {place: list(norms) for place, norms in self._norms.items()}, "num_skipped": self.num_skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._norms = {place: deque(norms, maxlen=self._window) for place, norms in state_dict["norms"].items()}
        self.num_skipped = state_dict["num_skipped"]


def _norm(optimizer: Any) -> float:
    """The norm of the optimizer's gradients, under other strategies as well."""
    if hasattr(optimizer, "grad_norm"):
        return float(optimizer.grad_norm())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params if param.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads))
