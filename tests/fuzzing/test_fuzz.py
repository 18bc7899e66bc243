"""Random programs of what users do, against torch DDP or plain torch; and faults that they have to find."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from megastrategy.core import sharded_step
from megastrategy.core.layout import BufferLayout
from megastrategy.core.reducer import Reducer

from .runs import run_for


def test_half_a_minute_of_random_programs() -> None:
    """Others each day. An hour of them: ``python -m tests.fuzzing --minutes 60``."""
    assert run_for(30.0, 1000 * datetime.datetime.now(datetime.UTC).date().toordinal()).num_cases > 0


def no_wait_for_reductions(patch: pytest.MonkeyPatch) -> None:
    wait = Reducer._wait_for_launched

    def planted(self: Reducer, **options: Any) -> None:
        for handle in self._handles:
            patch.setattr(handle, "wait", lambda: None, raising=False)
        wait(self, **options)

    patch.setattr(Reducer, "_wait_for_launched", planted)


def main_params_that_stay_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sharded_step, "take_outside_changes", lambda main, weights: None)


def padding_that_takes_an_element(patch: pytest.MonkeyPatch) -> None:
    owned_range = BufferLayout.owned_range

    def planted(self: BufferLayout, param: int, dp_rank: int) -> tuple[int, int] | None:
        span, slot = owned_range(self, param, dp_rank), self.slots[param]
        is_before_padding = span is not None and span[1] == slot.end < self.buckets[slot.bucket].end
        return (span[0], span[1] - 1) if span is not None and is_before_padding and span[0] < span[1] - 1 else span

    patch.setattr(BufferLayout, "owned_range", planted)


@pytest.mark.parametrize(
    "plant", [no_wait_for_reductions, main_params_that_stay_as_they_are, padding_that_takes_an_element]
)
def test_a_planted_fault_is_found_within_two_minutes(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_for(120.0, 0, shrinks=False)
