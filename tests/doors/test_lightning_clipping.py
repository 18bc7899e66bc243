"""Clipping that would do nothing is warned about, with the way out; clipping that works is not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.optim import Optimizer

from megastrategy._precision import HookWatch

from .features.clipping import (
    CLIP_NORM,
    CLIP_VALUE,
    FEATURES,
    Clipped,
    ClippedByHand,
    ClipsOddBatches,
    ClipsWithTheOptimizer,
)
from .fits import AwkwardModule, Fit, assert_same_fit, assert_same_tensors, fit
from .matrix import MODES
from .rank_processes import Ranks

REMEDIES = ("self.clip_gradients(", "optimizer.clip_grad_norm_(", "use_distributed_optimizer=False", "full_grad(")


def about_grad(result: Fit) -> list[str]:
    return [text for text in result.warnings if "which is None although the parameter has a gradient" in text]


def fit_kind(name: str, kind: type[AwkwardModule], **options: Any) -> Fit:
    return fit(name, module=kind(), max_epochs=1, **options)


class ClipsByHand(Clipped):
    """What users write who know torch: right under "ddp", and nothing under reduce-scatter."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)


def test_clipping_parameters_by_hand_warns_once_with_the_way_out(ranks: Ranks) -> None:
    """Every step of every epoch reads ``.grad`` of every parameter: one warning a fit, on rank zero."""
    ours = ranks.run(fit_kind, "megatron_ddp", ClipsByHand)
    (text,) = about_grad(ours[0])
    assert text.startswith("configure_gradient_clipping read .grad of '")
    for remedy in REMEDIES:
        assert remedy in text
    assert about_grad(ours[1]) == []
    unclipped = ranks.run(fit_kind, "megatron_ddp", Clipped)
    assert_same_tensors(ours[0].weights, unclipped[0].weights)  # as the warning says


def test_clipping_parameters_by_hand_works_without_the_sharded_optimizer(ranks: Ranks) -> None:
    """The way out that leaves the user's code as it is."""
    ours = ranks.run(fit_kind, "megatron_ddp", ClipsByHand, strategy_options=MODES["all-reduce"])
    theirs = ranks.run(fit_kind, "ddp", ClipsByHand)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)
        assert about_grad(mine) == []


def test_the_warning_comes_in_every_fit(ranks: Ranks) -> None:
    first, second = ranks.run(fit_twice)[0]
    assert len(about_grad(first)) == len(about_grad(second)) == 1


def fit_twice() -> tuple[Fit, Fit]:
    return fit_kind("megatron_ddp", ClipsByHand), fit_kind("megatron_ddp", ClipsByHand)


class LogsNothing(AwkwardModule):
    """The line from Lightning's documentation."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class Looks(pl.Callback):
    """A callback of the user's, in the other hook."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert all(param.grad is None for param in pl_module.parameters())


def test_logging_norms_from_grad_warns_and_names_the_strategys_function(ranks: Ranks) -> None:
    (text,) = about_grad(ranks.run(fit_kind, "megatron_ddp", LogsNothing)[0])
    assert text.startswith("on_before_optimizer_step read .grad of '")
    assert ".grad_norm()" in text


def fit_watched() -> Fit:
    return fit("megatron_ddp", callbacks=[Looks()])


def test_a_callback_that_reads_grad_is_warned_about_too(ranks: Ranks) -> None:
    (text,) = about_grad(ranks.run(fit_watched)[0])
    assert text.startswith("on_after_backward read .grad of '")


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
def test_what_works_is_not_warned_about(ranks: Ranks, kind: type[AwkwardModule]) -> None:
    """The engine's own way to the gradients goes through ``.grad`` in places, and is no user's doing."""
    for result in ranks.run(fit_kind, "megatron_ddp", kind):
        assert about_grad(result) == []


class CountingWatch(HookWatch):
    num_entered = 0

    def __enter__(self) -> Any:
        type(self).num_entered += 1
        return super().__enter__()


class CountWatches(pl.Callback):
    """Puts a counting watch in the place of the strategy's; overrides none of the watched hooks itself."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        CountingWatch.num_entered = 0
        strategy: Any = trainer.strategy
        assert type(strategy.hook_watch) is HookWatch
        strategy.hook_watch = CountingWatch(strategy.model, strategy._hook_owners)


def count_watches(kind: type[AwkwardModule]) -> int:
    fit("megatron_ddp", module=kind(), max_epochs=1, callbacks=[CountWatches()], gradient_clip_val=CLIP_NORM)
    return CountingWatch.num_entered


def test_nothing_is_watched_where_no_hook_is_overridden(ranks: Ranks) -> None:
    assert ranks.run(count_watches, AwkwardModule) == [0, 0]
    assert ranks.run(count_watches, LogsNothing) == [7, 7]


def without_clipping(name: str, strategy_options: dict[str, Any], kind: type[Clipped]) -> Fit:
    module = kind()
    if isinstance(module, ClippedByHand):
        module.clip_vals = (1e9, 1e9)
    elif kind is not Clipped:
        module = Clipped()
    return fit(name, strategy_options=strategy_options, module=module, max_epochs=1)


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if "accumulated" not in feature.name], ids=str)
def test_what_the_matrix_compares_is_clipped(ranks: Ranks, feature: Any) -> None:
    """Values that clip nothing would be equal too."""
    clipped = ranks.run(feature.job, "ddp", {}, **feature.options)[0][0]
    unclipped = ranks.run(without_clipping, "ddp", {}, kind=feature.options.get("kind", Clipped))[0]
    assert not torch.allclose(clipped.weights["inputs.weight"], unclipped.weights["inputs.weight"], rtol=1e-3)
