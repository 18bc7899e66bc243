"""The monitor's time in which training waits for communication."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megastrategy.core import private_group
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
    num_waits = 2 if mode == "reduce-scatter" else 1
    for lines, seconds in ranks.run(monitored_with_delays, MODES[mode], log_every_n_steps=2):
        assert len(lines) == 2
        for _, values in lines:
            assert values["exposed_ms"] >= num_waits * DELAY_S * 1e3
        assert 2 * lines[0][1]["exposed_ms"] + lines[1][1]["exposed_ms"] < seconds * 1e3, "steps of 2 and of 1"


def monitored_with_delays(strategy_options: dict[str, Any], **options: Any) -> tuple[Lines, float]:
    """The logged values, and the seconds of the fit."""

    def collectives(device: torch.device, agreed: bool) -> DelayingCollectives:
        return DelayingGathers(private_group(None, device), DELAY_S)

    start = time.perf_counter()
    with mock.patch("megastrategy._lightning.meshes.engine_collectives", collectives):
        lines = monitored(Net, strategy_options, max_epochs=1, limit_train_batches=3, **options)
    return lines, time.perf_counter() - start
