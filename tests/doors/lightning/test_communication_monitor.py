"""The CommunicationMonitor's numbers in the log, and other listeners to the engine's events."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from megastrategy import CommunicationMonitor, MegatronDDPStrategy
from megastrategy.core import EventKind, private_group
from tests.doors.features.precision import half_precision
from tests.support.doubles import DelayingCollectives

from ..fits import (
    BATCHES_PER_EPOCH,
    Fit,
    MemoryLogger,
    assert_same_fit,
    fit,
    loader,
    make_strategy,
    make_trainer,
)
from ..rank_processes import SIZE, Ranks

Lines = list[tuple[int | None, dict[str, float]]]


class Net(pl.LightningModule):
    """With ``bucket_size=1`` each of its tensors is a bucket, of sizes known without asking the engine."""

    def __init__(self, hidden: int = 128, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = nn.Linear(5, hidden, bias=bias)
        self.outputs = nn.Linear(hidden, 11, bias=bias)

    def loss(self, batch: Any) -> Tensor:
        features, _, targets = batch
        return F.cross_entropy(self.outputs(torch.tanh(self.inputs(features.to(self.dtype)))).float(), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SENT_BYTES = 8 * (5 * 128 + 128 * 11) * (SIZE - 1) / SIZE
"""A step of Net in fp32, reduce-scattered and gathered, or all-reduced."""


def monitored(**options: Any) -> Lines:
    """Everything that is logged on this rank."""
    callbacks = [CommunicationMonitor()]
    return fit("megatron_ddp", strategy_options={"bucket_size": 1}, module=Net(), callbacks=callbacks, **options).logged


def lines_of(logged: Lines) -> Lines:
    """The monitor's values, without their prefix."""
    prefix = "communication/"
    return [
        (step, {key.removeprefix(prefix): value for key, value in values.items()})
        for step, values in logged
        if any(key.startswith(prefix) for key in values)
    ]


def column(lines: Lines, name: str) -> list[float]:
    return [values[name] for _, values in lines]


def steps_of(lines: Lines) -> list[int | None]:
    return [step for step, _ in lines]


class WholeNorm(pl.Callback):
    """Logs the norm as ``CommunicationMonitor`` does, from the whole tensors of torch DDP."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        grads = [param.grad.flatten() for param in pl_module.parameters()]
        pl_module.log("communication/grad_norm", float(torch.cat(grads).norm()))


# --- when it logs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (4, 3), (0, 1)])
def test_monitor_logs_when_the_loss_is_logged(ranks: Ranks, every: int, accumulate: int) -> None:
    """Under the same steps, so that the two can be plotted over each other, and at the end; nothing is logged twice."""
    for logged in ranks.run(monitored, log_every_n_steps=every, accumulate_grad_batches=accumulate):
        num_steps = 2 * -(-BATCHES_PER_EPOCH // accumulate)
        expected = list(range(every - 1, num_steps, every)) if every else []
        assert expected == [step for step, values in logged if "train_loss" in values]
        if every and num_steps % every:
            expected.append(num_steps - 1)
        lines = lines_of(logged)
        assert steps_of(lines) == expected
        assert column(lines, "sent_bytes") == [SENT_BYTES] * len(expected), "averaged over the steps of its window"


def norms_of_both(**options: Any) -> tuple[Lines, Lines]:
    def logged(strategy: str, callback: pl.Callback) -> Lines:
        result = fit(strategy, module=Net(), callbacks=[callback], gradient_clip_val=0.05, **options)
        return [(step, values) for step, values in lines_of(result.logged) if "grad_norm" in values]

    return logged("megatron_ddp", CommunicationMonitor()), logged("ddp", WholeNorm())


def test_logged_norm_is_that_before_clipping(ranks: Ranks) -> None:
    ours, whole = ranks.run(norms_of_both, log_every_n_steps=2, accumulate_grad_batches=3)[0]
    assert len(whole) > 1
    assert steps_of(ours) == steps_of(whole)
    for (_, norms), (_, expected) in zip(ours, whole, strict=True):
        assert norms["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        assert norms["grad_norm"] > 0.05, "before clipping"


def test_monitor_of_a_resumed_fit_goes_on_at_its_step(ranks: Ranks, tmp_path: Path) -> None:
    for first, second in ranks.run(fit_and_resume, str(tmp_path / "last.ckpt")):
        assert steps_of(first) == [3, 6]
        assert steps_of(second) == [7, 11, 13], "every fourth of all steps, then what is left"
        assert column(second, "sent_bytes") == [SENT_BYTES] * 3


def fit_and_resume(path: str) -> tuple[Lines, Lines]:
    logs = []
    for epochs, checkpoint in ((1, None), (2, path)):
        logger = MemoryLogger()
        trainer = make_trainer(
            make_strategy("megatron_ddp", bucket_size=1),
            logger=logger,
            callbacks=[CommunicationMonitor()],
            log_every_n_steps=4,
            max_epochs=epochs,
        )
        trainer.fit(Net(), loader(), ckpt_path=checkpoint)
        if checkpoint is None:
            trainer.save_checkpoint(path)
        logs.append(lines_of(logger.history))
    return logs[0], logs[1]


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_monitor_says_that_it_needs_a_logger(ranks: Ranks) -> None:
    ranks.run(fit_without_what_it_needs)


def fit_without_what_it_needs() -> None:
    trainer = make_trainer(make_strategy("megatron_ddp"), callbacks=[CommunicationMonitor()], logger=False)
    with pytest.raises(
        MisconfigurationException, match=r"`CommunicationMonitor` callback with `Trainer\(logger=False\)`"
    ):
        trainer.fit(Net(), loader())
    trainer = make_trainer(make_strategy("ddp"), callbacks=[CommunicationMonitor()], logger=MemoryLogger())
    with pytest.raises(MisconfigurationException, match=r"is lightning\.pytorch\.strategies\.ddp\.DDPStrategy: choose"):
        trainer.fit(Net(), loader())


# --- the time in which training waits --------------------------------------------------------------------------------


DELAY_S = 0.02


def test_exposed_time_is_what_training_waits_for(ranks: Ranks) -> None:
    """The first of two buckets may hide behind the launch of the second; the delay of the second cannot hide."""
    for lines, seconds in ranks.run(monitored_with_delays):
        exposed_ms = column(lines, "exposed_ms")
        assert min(exposed_ms) >= DELAY_S * 1e3
        assert 2 * exposed_ms[0] + exposed_ms[1] < seconds * 1e3, "steps of 2 and of 1"


def monitored_with_delays() -> tuple[Lines, float]:
    """The logged values, and the seconds of the fit."""

    def collectives(device: torch.device, agreed: bool) -> DelayingCollectives:
        return DelayingCollectives(private_group(None, device), DELAY_S)

    start = time.perf_counter()
    with mock.patch("megastrategy._lightning.meshes.engine_collectives", collectives):
        logged = monitored(max_epochs=1, limit_train_batches=3, log_every_n_steps=2)
    return lines_of(logged), time.perf_counter() - start


# --- listeners -------------------------------------------------------------------------------------------------------


class AddsListener(pl.Callback):
    """Listens by itself, as a profiler would."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, int]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.strategy.add_listener(lambda event: self.events.append((event.kind, event.index)))  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with pytest.raises(RuntimeError, match="set up already: add listeners before"):
            trainer.strategy.add_listener(print)  # type: ignore[attr-defined]


def fit_with_listeners(is_watched: bool) -> tuple[Fit, list[list[tuple[EventKind, int]]]]:
    listeners = [AddsListener(), AddsListener()] if is_watched else []
    callbacks = [CommunicationMonitor(), *listeners] if is_watched else []
    return fit("megatron_ddp", callbacks=callbacks), [listener.events for listener in listeners]


def test_fit_with_listeners_is_the_same_fit(ranks: Ranks) -> None:
    """To the bit, and all listeners hear the same."""
    watched, plain = (ranks.run(fit_with_listeners, is_watched) for is_watched in (True, False))
    for (mine, [first, second]), (other, _) in zip(watched, plain, strict=True):
        mine.logged = [
            (step, values) for step, values in mine.logged if not any(key.startswith("communication") for key in values)
        ]
        assert_same_fit(mine, other)
        assert first == second
        assert first.count((EventKind.STEP_END, 0)) == 14


# --- check_for_nan_in_grad -------------------------------------------------------------------------------------------


def test_nan_check_is_refused_beside_a_grad_scaler(ranks: Ranks) -> None:
    """The scaler provokes infinite gradients and skips their steps; the check would end the fit at the first."""
    ranks.run(fit_with_check_and_scaler)


def fit_with_check_and_scaler() -> None:
    plugin = half_precision()
    scaler = plugin.scaler
    trainer = make_trainer(MegatronDDPStrategy(check_for_nan_in_grad=True), plugins=[plugin])
    with pytest.raises(ValueError, match="check_for_nan_in_grad=True contradicts the GradScaler of MixedPrecision"):
        trainer.fit(Net(), loader())
    assert plugin.scaler is scaler
    assert type(plugin) is MixedPrecision
    for allowed in ({"precision": "bf16-mixed"}, {"plugins": [half_precision(enabled=False)]}):
        trainer = make_trainer(MegatronDDPStrategy(check_for_nan_in_grad=True), max_epochs=1, **allowed)
        trainer.fit(Net(), loader())
        assert trainer.global_step == BATCHES_PER_EPOCH
