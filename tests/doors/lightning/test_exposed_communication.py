"""The monitor's share of time in which training waits for communication."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from megastrategy._lightning.communication_monitor import _KEPT_INTERVALS, _Record
from megastrategy.core import Event, EventKind, private_group
from tests.support.doubles import DelayingCollectives

from ..monitored_fits import MODES, Lines, Net, monitored
from ..rank_processes import Ranks

DELAY_S = 0.02


class DelayingGathers(DelayingCollectives):
    """The gather of parameters is late too."""

    def all_gather(self, tensor: Tensor) -> Any:
        start = getattr(self._real, "_start")  # noqa: B009 - the worker of the real one, on purpose
        start("delay", lambda: time.sleep(self._delay_s))
        return super().all_gather(tensor)


@pytest.mark.parametrize("mode", ["reduce-scatter", "all-reduce"])
def test_exposed_communication_is_what_training_waits_for(ranks: Ranks, mode: str) -> None:
    """The first of two buckets may hide behind the launch of the second; the delay of the second cannot hide."""
    for lines, seconds in ranks.run(monitored_with_delays, MODES[mode], log_every_n_steps=2):
        assert len(lines) == 2
        for _, values in lines:
            assert values["exposed_gradients_ms"] >= DELAY_S * 1e3
            if mode == "reduce-scatter":
                assert values["exposed_parameters_ms"] >= DELAY_S * 1e3
            else:
                assert values["exposed_parameters_ms"] == 0
            assert values["exposed_ms"] == values["exposed_gradients_ms"] + values["exposed_parameters_ms"]
            assert 0 < values["exposed_share"] <= 1
        assert 2 * lines[0][1]["exposed_ms"] + lines[1][1]["exposed_ms"] < seconds * 1e3, "steps of 2 and of 1"


def test_the_share_is_of_the_time_in_batches(ranks: Ranks) -> None:
    """A batch's own computation counts as its time, the time between two batches does not."""
    for lines, seconds in ranks.run(monitored_with_delays, {}, module=Sleeps):
        batches_ms = [values["exposed_ms"] / values["exposed_share"] for _, values in lines]
        for (_, values), batch_ms in zip(lines, batches_ms, strict=True):
            assert batch_ms >= values["exposed_ms"] + SLEEP_S * 1e3
        assert sum(batches_ms) <= (seconds - len(lines) * SLEEP_S) * 1e3


def test_the_share_of_several_steps_is_of_all_their_batches(ranks: Ranks) -> None:
    for lines, seconds in ranks.run(monitored_with_delays, {}, module=Sleeps, log_every_n_steps=2):
        steps = [2, 1]
        shares = [values["exposed_ms"] / values["exposed_share"] for _, values in lines]
        batches_ms = [count * share for count, share in zip(steps, shares, strict=True)]
        for (_, values), batch_ms, count in zip(lines, batches_ms, steps, strict=True):
            assert batch_ms >= count * (values["exposed_ms"] + SLEEP_S * 1e3)
        assert sum(batches_ms) <= (seconds - sum(steps) * SLEEP_S) * 1e3


SLEEP_S = 0.1


class Sleeps(Net):
    """In its batches, and between them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        time.sleep(SLEEP_S)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(SLEEP_S)


def monitored_with_delays(
    strategy_options: dict[str, Any], module: Callable[[], pl.LightningModule] = Net, **options: Any
) -> tuple[Lines, float]:
    """The logged values, and the seconds of the fit."""

    def collectives(device: torch.device, agreed: bool) -> DelayingCollectives:
        return DelayingGathers(private_group(None, device), DELAY_S)

    start = time.perf_counter()
    with mock.patch("megastrategy._lightning.meshes.engine_collectives", collectives):
        lines = monitored(module, strategy_options, max_epochs=1, limit_train_batches=3, **options)
    return lines, time.perf_counter() - start


class CountingClock:
    """A millisecond passes with every look."""

    def __init__(self) -> None:
        self.time = 0

    def now(self) -> int:
        self.time += 1
        return self.time

    def elapsed_ms(self, start: int, end: int) -> float:
        return end - start


def test_a_collective_is_charged_by_the_buckets_of_its_time() -> None:
    """Two of three buckets have ended when the step is logged."""
    numels = [128, 256, 640]
    record = _Record(CountingClock(), lambda kind, bucket: numels[bucket])  # type: ignore[arg-type]
    for bucket in range(3):
        record(Event(EventKind.REDUCE_START, bucket))
    numels[:] = [896, 128]
    record(Event(EventKind.LAYOUT_CHANGED, 2))
    for bucket in range(2):
        record(Event(EventKind.GATHER_START, bucket))
    assert record.pop_totals()[1] == 2 * 1024


def test_a_rare_log_keeps_no_more_intervals_and_adds_up_all() -> None:
    """On CUDA each holds two events."""
    record = _Record(CountingClock(), lambda kind, bucket: 0)  # type: ignore[arg-type]
    for _ in range(5 * _KEPT_INTERVALS):
        record(Event(EventKind.WAIT_START, 1))
        record(Event(EventKind.WAIT_END, 1))
        assert len(record._intervals) < 2 * _KEPT_INTERVALS
    nothing = {"gradients": 0, "parameters": 0, "batch": 0, "between batches": 0}
    assert record.pop_totals()[0] == nothing | {"parameters": 5 * _KEPT_INTERVALS}
    assert record.pop_totals()[0] == nothing
