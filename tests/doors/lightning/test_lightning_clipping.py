"""Clipping that would do nothing is refused, with the way out; clipping that works is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.optim import Optimizer

from tests.doors.features.clipping import (
    CLIP_NORM,
    CLIP_VALUE,
    Clipped,
    ClipsOddBatches,
    ClipsWithTheOptimizer,
)

from ..fits import AwkwardModule, Fit, assert_same_fit, fit
from ..matrix import MODES
from ..rank_processes import Ranks, assert_failed

REMEDIES = ("self.clip_gradients", "clip_grad_norm_", "use_distributed_optimizer=False", "full_grad(", "grad_norm()")


def fit_kind(name: str, kind: type[AwkwardModule], **options: Any) -> Fit:
    return fit(name, module=kind(), max_epochs=1, **options)


class ClipsByHand(Clipped):
    """Clips as in plain torch: right under "ddp", and without effect under reduce-scatter."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)


class LogsNothing(AwkwardModule):
    """The line from Lightning's documentation."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class LooksInACallback(pl.Callback):
    """A callback of the user's, in the other hook."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        grads = [param.grad for param in pl_module.parameters() if param.grad is not None]
        pl_module.log("largest", max(grad.abs().max() for grad in grads))


def fit_looking() -> Fit:
    return fit("megatron_ddp", callbacks=[LooksInACallback()])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "job",
    [partial(fit_kind, "megatron_ddp", ClipsByHand), partial(fit_kind, "megatron_ddp", LogsNothing), fit_looking],
    ids=["clips", "logs", "callback"],
)
def test_computing_with_grad_in_a_hook_ends_the_fit_with_the_way_out(ranks: Ranks, job: Any) -> None:
    for failure in ranks.outcomes(job):
        assert_failed(failure, kind="ReducedGradError")
        for remedy in REMEDIES:
            assert remedy in failure.message
        assert failure.seconds < 30


def test_clipping_parameters_by_hand_works_without_the_sharded_optimizer(ranks: Ranks) -> None:
    """The way out that leaves the user's code as it is."""
    ours = ranks.run(fit_kind, "megatron_ddp", ClipsByHand, strategy_options=MODES["all-reduce"])
    theirs = ranks.run(fit_kind, "ddp", ClipsByHand)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)


class LooksElsewhere(AwkwardModule):
    """Hooks that have nothing to do with what is hidden: frozen and unused parameters, plain tensors, full_grad."""

    def on_after_backward(self) -> None:
        assert self.frozen.weight.grad is None
        assert torch.ones(1).grad is None
        if self.trainer.fit_loop.epoch_loop.batch_idx == 0:
            assert self.side.weight.grad is None  # no rank has used it
        full = self.trainer.strategy.full_grad(self.out.weight)  # type: ignore[attr-defined]
        assert full is not None
        self.out.weight.grad = full

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        assert self.out.weight.grad is not None  # its own, from above

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=CLIP_VALUE, gradient_clip_algorithm="value")


@pytest.mark.parametrize("kind", [ClipsOddBatches, ClipsWithTheOptimizer, LooksElsewhere])
def test_what_is_no_reading_is_not_refused(ranks: Ranks, kind: type[AwkwardModule]) -> None:
    assert len(ranks.run(fit_kind, "megatron_ddp", kind)) == 2
