"""Schedulers, hooks and callbacks see and do under ``megatron_ddp`` what they see and do under ``"ddp"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from .fits import AwkwardModule, Fit, adamw, assert_same_fit, fit
from .rank_processes import Ranks

# --- schedulers ------------------------------------------------------------------------------------------------------


def warmup(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: (step + 1) / 5)


def decay(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def two_groups(params: Any) -> Optimizer:
    first, *rest = params
    return torch.optim.AdamW([{"params": [first], "lr": 3e-3}, {"params": rest}], lr=1e-2)


@pytest.mark.parametrize(("scheduler", "interval"), [(warmup, "step"), (decay, "epoch"), (None, "step")])
@pytest.mark.parametrize("optimizer", [adamw, two_groups])
def test_learning_rates_are_scheduled_and_monitored_as_under_ddp(
    ranks: Ranks,
    optimizer: Callable[[Any], Optimizer],
    scheduler: Callable[[Optimizer], Any] | None,
    interval: str,
) -> None:
    """Schedulers hold the user's optimizer and the monitor asks the Trainer's: both must see what the step uses."""
    ours = ranks.run(fit_scheduled, "megatron_ddp", optimizer, scheduler, interval)
    theirs = ranks.run(fit_scheduled, "ddp", optimizer, scheduler, interval)
    for (mine, my_rates), (other, other_rates) in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)
        assert my_rates == other_rates
        assert not [text for text in mine.warnings if "lr_scheduler" in text]
    history = ours[0][0].logged
    assert any(key.startswith("lr-AdamW") for _, values in history for key in values)
    if scheduler is not None:
        assert len({tuple(rates) for rates in ours[0][1]}) > 1, "the scheduler never changed anything"


def fit_scheduled(
    name: str,
    optimizer: Callable[[Any], Optimizer],
    scheduler: Callable[[Optimizer], Any] | None,
    interval: str,
) -> tuple[Fit, list[list[float]]]:
    recorder = RecordRates()
    result = fit(
        name,
        module=AwkwardModule(optimizer, scheduler, interval),
        callbacks=[recorder, LearningRateMonitor(logging_interval="step")],
        accumulate_grad_batches=3,
    )
    return result, recorder.rates


class RecordRates(pl.Callback):
    """The learning rates of ``trainer.optimizers`` after every batch."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append([group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups])


def test_a_plateau_scheduler_follows_the_monitored_metric_as_under_ddp(ranks: Ranks) -> None:
    """ReduceLROnPlateau insists on a torch optimizer and is stepped with a metric by Lightning."""
    ours, theirs = (ranks.run(fit_plateau, name) for name in ("megatron_ddp", "ddp"))
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)


def fit_plateau(name: str) -> Fit:
    return fit(name, module=Plateau(), max_epochs=3)


class Plateau(AwkwardModule):
    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.1)  # max: a falling loss is a plateau
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


# --- gradients seen by hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_hooks_see_ddps_gradients(ranks: Ranks, hook: str) -> None:
    """In ``.grad`` with all-reduce; with reduce-scatter ``.grad`` is None, never wrong, and full_grad() has them."""
    theirs = ranks.run(record_grads, "ddp", hook)
    reduced = ranks.run(record_grads, "megatron_ddp", hook, strategy_options={"use_distributed_optimizer": False})
    scattered = ranks.run(record_grads, "megatron_ddp", hook)
    for other, mine, shard in zip(theirs, reduced, scattered, strict=True):
        assert len(other.grads) == len(mine.grads) == len(shard.full_grads) == 2 * 7
        for batch, expected in enumerate(other.grads):
            present = {name: grad for name, grad in expected.items() if grad is not None}
            assert len(present) > 5
            for name, grad in expected.items():
                for found in (mine.grads[batch][name], shard.full_grads[batch][name]):
                    assert (found is None) == (grad is None), f"{name} in batch {batch}"
                    assert found is None or torch.equal(found, grad), f"{name} in batch {batch}"
        assert all(grad is None for grads in shard.grads for grad in grads.values())


class RecordGrads(pl.Callback):
    """Copies of every parameter's ``.grad`` and, where the strategy has it, ``full_grad`` in one of the two hooks."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.grads: list[dict[str, Tensor | None]] = []
        self.full_grads: list[dict[str, Tensor | None]] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.hook == "on_after_backward":
            self._record(trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self.hook == "on_before_optimizer_step":
            self._record(trainer, pl_module)

    def _record(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainable = [(name, param) for name, param in pl_module.named_parameters() if param.requires_grad]
        self.grads.append({name: None if p.grad is None else p.grad.clone() for name, p in trainable})
        full_grad = getattr(trainer.strategy, "full_grad", None)
        if full_grad is not None:
            self.full_grads.append({name: full_grad(param) for name, param in trainable})


def record_grads(name: str, hook: str, **options: Any) -> RecordGrads:
    recorder = RecordGrads(hook)
    fit(name, callbacks=[recorder], **options)
    return recorder


# --- callbacks that change weights, schedule or accumulation ---------------------------------------------------------


def averaging() -> pl.Callback:
    return StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=2, annealing_epochs=1)


def accumulation() -> pl.Callback:
    return GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})


def moving_average() -> pl.Callback:
    return EMAWeightAveraging(decay=0.9)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("callback", [averaging, accumulation, moving_average])
def test_lightnings_callbacks_do_what_they_do_under_ddp(
    ranks: Ranks, callback: Callable[[], pl.Callback], sharded: bool
) -> None:
    """They read and replace weights while the engine holds them in its buffer."""
    ours = ranks.run(fit_callback, "megatron_ddp", callback, {"use_distributed_optimizer": sharded})
    theirs = ranks.run(fit_callback, "ddp", callback, {})
    without = ranks.run(fit, "ddp", max_epochs=4)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)
    assert not torch.equal(theirs[0].weights["out.weight"], without[0].weights["out.weight"])


def fit_callback(name: str, callback: Callable[[], pl.Callback], strategy_options: dict[str, Any]) -> Fit:
    return fit(name, callbacks=[callback()], strategy_options=strategy_options, max_epochs=4)
