"""Listeners to the engine's events in a fit: none without a monitor, several beside it, none changes the fit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from megastrategy import CommunicationMonitor
from megastrategy.core import EventKind

from ..fits import AwkwardModule, Fit, MemoryLogger, adamw, assert_same_fit, fit, loader, make_strategy, make_trainer
from ..monitored_fits import MODES, SENT_BYTES, Lines, Net, column, monitored
from ..rank_processes import Ranks


class SeesListeners(pl.Callback):
    """The listeners that the engine calls with its events, in a fit."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model: Any = trainer.strategy.model
        self.seen += [model.engine._listener, model.engine.reducer._listener, model.engine.param_gather._listener]


class AddsListener(pl.Callback):
    """Listens by itself, as a profiler would."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, int]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.strategy.add_listener(lambda event: self.events.append((event.kind, event.index)))  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with pytest.raises(RuntimeError, match="set up already: add listeners before"):
            trainer.strategy.add_listener(print)  # type: ignore[attr-defined]


def test_without_the_monitor_the_engine_makes_no_events(ranks: Ranks) -> None:
    """Before, after, and after an exception in a fit that was monitored, with the same strategy object."""
    ranks.run(look_for_listeners)


def look_for_listeners() -> None:
    trainer = make_trainer(make_strategy("megatron_ddp"), max_epochs=0, logger=MemoryLogger())
    usual = trainer.callbacks
    for module, monitors in (
        (Net(), []),
        (Net(), [CommunicationMonitor()]),
        (Net(), []),
        (Raises(), [CommunicationMonitor()]),
        (Net(), []),
    ):
        sees = SeesListeners()
        trainer.callbacks = [*usual, sees, *monitors]
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        if isinstance(module, Raises):
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                trainer.fit(module, loader())
        else:
            trainer.fit(module, loader())
        assert [listener is None for listener in sees.seen] == [not monitors] * 3


class Raises(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == 2:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


def test_several_listeners_hear_the_same(ranks: Ranks) -> None:
    for lines, first, second in ranks.run(fit_with_three_listeners):
        assert column(lines, "sent_bytes") == [SENT_BYTES] * 7
        assert first == second
        assert first.count((EventKind.STEP_END, 0)) == 7


def fit_with_three_listeners() -> tuple[Lines, Any, Any]:
    others = [AddsListener(), AddsListener()]
    lines = monitored(callbacks=others, max_epochs=1)
    return lines, others[0].events, others[1].events


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["reduce-scatter", "all-reduce"])
def test_a_fit_that_is_watched_is_the_same_fit(ranks: Ranks, mode: str) -> None:
    """To the bit."""
    watched, plain = (ranks.run(fit_awkward, MODES[mode], monitor) for monitor in (True, False))
    for mine, other in zip(watched, plain, strict=True):
        mine.logged = [
            (step, values) for step, values in mine.logged if not any(key.startswith("communication") for key in values)
        ]
        assert_same_fit(mine, other)


def fit_awkward(strategy_options: dict[str, Any], monitor: bool) -> Fit:
    callbacks = [CommunicationMonitor()] if monitor else []
    return fit("megatron_ddp", strategy_options=strategy_options, module=AwkwardModule(adamw), callbacks=callbacks)
