"""Random programs of what users do, against torch DDP or plain torch; and faults that they have to find."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest

from megastrategy.core.data_path.bucket import Bucket, State
from megastrategy.core.data_path.engine import Engine
from megastrategy.core.layout.layout import BufferLayout
from megastrategy.core.optimizer import sharded_optimizer
from megastrategy.core.optimizer.runs import MainParams, group_members

from ..support.timeouts import HANG_S
from .cases import Case
from .runs import run_for


def test_six_seconds_of_random_programs() -> None:
    """Others each day. An hour of them: ``python -m tests.fuzzing --minutes 60``."""
    assert run_for(6.0, 1000 * datetime.datetime.now(datetime.UTC).date().toordinal()) > 0


def no_wait_for_reductions(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Bucket) -> None:
        self.state = State.REDUCED

    patch.setattr(Bucket, "wait", planted)


def main_params_that_stay_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MainParams, "take_outside_changes", lambda self: None)


def padding_that_takes_an_element(patch: pytest.MonkeyPatch) -> None:
    owned_range = BufferLayout.owned_range

    def planted(self: BufferLayout, param: int, dp_rank: int) -> tuple[int, int] | None:
        span, slot = owned_range(self, param, dp_rank), self.slots[param]
        is_before_padding = span is not None and span[1] == slot.end < self.buckets[slot.bucket].end
        return (span[0], span[1] - 1) if span is not None and is_before_padding and span[0] < span[1] - 1 else span

    patch.setattr(BufferLayout, "owned_range", planted)


def module_buffers_that_autograd_sees_written(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Engine) -> None:
        self._buffer_collectives.broadcast_all(self.watch.buffers())

    patch.setattr(Engine, "broadcast_buffers", planted)


def moved_views_that_come_back_as_they_were(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bucket, "_take_back_moved", lambda self: None)


def counters_that_joined_parameters_share(patch: pytest.MonkeyPatch) -> None:
    def planted(members: Any, key: Any) -> Any:
        return [list(members)] if all(map(key, members)) else group_members(members, key)

    patch.setattr(sharded_optimizer, "group_members", planted)


def _fails(test: Callable[[], None]) -> bool:
    try:
        test()
    except AssertionError:
        return True
    return False


PLANTS = [
    no_wait_for_reductions,
    main_params_that_stay_as_they_are,
    padding_that_takes_an_element,
    module_buffers_that_autograd_sees_written,
    moved_views_that_come_back_as_they_were,
    counters_that_joined_parameters_share,
]


@pytest.mark.nightly
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found_within_two_minutes(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The minutes are this process's own: a loaded machine takes longer."""
    plant(monkeypatch)
    begun = time.process_time()
    with pytest.raises(AssertionError):
        run_for(HANG_S, 0, shrinks=False)
    assert time.process_time() - begun < 120.0


@pytest.mark.nightly
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_fault_shrinks_to_few_actions(plant: Any) -> None:
    """The test that it prints fails with the fault, and passes without. Run with ``-m nightly -s`` to see it."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError) as found:
            run_for(HANG_S, 0)
        printed = found.value.__notes__[-1]
        print(printed)  # noqa: T201
        names: dict[str, Any] = {}
        exec(printed.split("As a test:\n\n")[1], names)
        (test,) = (value for name, value in names.items() if name.startswith("test_"))
        assert any(_fails(test) for _ in range(20)), "a race need not be lost each time, but in 20 times it is"
    assert not _fails(test)
    played: list[Case] = []
    names["check"] = played.append
    test()
    assert len(played[0].program) <= 3
    assert len(played[0].layers) <= 2
