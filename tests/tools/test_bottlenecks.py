"""Verdicts: what a training is bound by, and which rank is late, from made-up measurements."""

from __future__ import annotations

import pytest

from megastrategy.tools.bottlenecks import RankTimes, rank_times, verdict_of, verdicts
from megastrategy.tools.timeline import ModelEvents, RankEvents

from .timeline_events import FORWARD, MS, WAIT, in_order, one_step, span


def times(rank: int = 0, input_ms: float = 0.0, gradients_ms: float = 0.0, parameters_ms: float = 0.0) -> RankTimes:
    return RankTimes(rank, 100.0, input_ms, gradients_ms, parameters_ms)


@pytest.mark.parametrize(
    ("ranks", "kind", "says"),
    [
        ([times(input_ms=4, gradients_ms=5)], "compute-bound", "of 100.0 ms a step 91.0 are the rank's own work"),
        ([times(input_ms=40, gradients_ms=5)], "input-bound", "40% of the time of rank 0 waits for the next batch"),
        # One rank that loads slowly keeps all waiting: its own share counts, not the mean.
        ([times(), times(1, input_ms=30)], "input-bound", "30% of the time of rank 1"),
        ([times(gradients_ms=20, parameters_ms=10)], "link-bound", "30% of the time waits for communication"),
        ([times(gradients_ms=10, parameters_ms=20)], "link-bound", "most of it for new weights"),
        ([times(input_ms=12, gradients_ms=20)], "link-bound", "most of it for gradients"),
    ],
)
def test_the_largest_wait_names_the_verdict(ranks: list[RankTimes], kind: str, says: str) -> None:
    verdict = verdict_of(ranks)
    assert verdict.kind == kind
    assert says in verdict.sentence
    assert "\n" not in verdict.sentence


def launched(late_ms: dict[int, float], *, ranks: int = 4, clock_ms: tuple[float, ...] = (0,) * 4) -> list[RankTimes]:
    """50 launches 100 ms apart; ``late_ms`` by rank, in all but every sixth, where rank 0 is late by 1 ms. Each ends
    20 ms after the last has launched, on clocks that are ``clock_ms`` ahead."""
    found = []
    for rank in range(ranks):
        launches = {}
        for number in range(50):
            late = (late_ms if number % 6 else {0: 1.0}).get(rank, 0.0)
            latest = max((late_ms if number % 6 else {0: 1.0}).values(), default=0.0)
            base, ahead = 100 * number, clock_ms[rank]
            launches[number] = round((base + late + ahead) * MS), round((base + latest + 20 + ahead) * MS)
        found.append(RankTimes(rank, 100.0, 0.0, 30.0 if rank not in late_ms else 1.0, 0.0, launches))
    return found


def test_a_straggler_is_told_with_its_number_its_count_and_by_how_much() -> None:
    verdict = verdict_of(launched({3: 18.0}))
    assert verdict.kind == "straggler"
    assert "rank 3 was last in 41 of 50 buckets, by 18.0 ms of a step of 100.0" in verdict.sentence
    assert "look at its device" in verdict.sentence


def test_clocks_that_differ_make_no_straggler() -> None:
    """Rank 2's clock is 500 ms ahead, as another machine's may be: only the ends of collectives tell."""
    verdict = verdict_of(launched({3: 18.0}, clock_ms=(0, 0, 500, -70)))
    assert verdict.lateness is not None
    assert (verdict.lateness.rank, verdict.lateness.num_last) == (3, 41)
    assert verdict.lateness.late_ms == pytest.approx(18.0)
    assert verdict_of(launched({}, clock_ms=(0, 0, 500, -70))).kind == "link-bound"


# --- of a record ------------------------------------------------------------------------------------------------------


def recorded(rank: int = 0, late: float = 0.0, *, clock: float = 0.0, num_steps: int = 4) -> RankEvents:
    """Steps of 100 ms every 150, 30 of them loading; between the first two is an evaluation of 40 ms with a wait."""
    evaluation = in_order(span(FORWARD, 105, 145, 0), span(WAIT, 110, 115, 1))
    events = []
    for number in range(num_steps):
        after = late + (190 if number else 0) + 150 * max(number - 1, 0)
        events += one_step(after)
        events += evaluation if number == 0 else []
    loads = [
        (round((late + 150 * n + 192) * MS) - 32 * MS, round((late + 150 * n + 192) * MS) - 2 * MS) for n in range(9)
    ]
    return RankEvents(rank, [ModelEvents(events)], round(-clock * MS), loads)


def test_an_evaluation_counts_nowhere() -> None:
    rank = recorded()
    times = rank_times(rank, rank.models[0])
    # 490 ms from the first step's start to the last one's, less 40; 3 loads of 30 ms, each until a step begins
    assert times.period_ms == pytest.approx(150.0)
    assert (times.gradients_ms, times.parameters_ms) == (9.0, 14.0)
    assert times.input_ms == pytest.approx(30.0)


def test_the_verdict_of_a_record_is_that_of_its_ranks() -> None:
    """Rank 1 launches each bucket 12 ms after rank 0, and they end 12 ms later there: it is a clock that differs."""
    [verdict] = verdicts([recorded(), recorded(1, 12.0)])
    assert verdict.kind == "input-bound"
    assert verdicts([RankEvents(0, [ModelEvents([])])]) == []
