"""Listeners to the engine's events in a fit: none without a monitor, several beside it, none changes the fit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from megastrategy import CommunicationMonitor
from megastrategy.core import EventKind

from ..fits import AwkwardModule, Fit, adamw, assert_same_fit, fit
from ..monitored_fits import MODES, SENT_BYTES, Lines, column, monitored
from ..rank_processes import Ranks


class AddsListener(pl.Callback):
    """Listens by itself, as a profiler would."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, int]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.strategy.add_listener(lambda event: self.events.append((event.kind, event.index)))  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with pytest.raises(RuntimeError, match="set up already: add listeners before"):
            trainer.strategy.add_listener(print)  # type: ignore[attr-defined]


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
