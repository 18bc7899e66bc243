"""``summary.json``: the numbers of training steps alone, and two of them compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastrategy.tools.summary import SummaryError, compare, rank_times, read_summary, summary
from megastrategy.tools.timeline import ModelEvents, RankEvents

from .timeline_events import FORWARD, MS, WAIT, in_order, one_step, span


def recorded(rank: int = 0, late: float = 0.0, *, clock: float = 0.0, num_steps: int = 4) -> RankEvents:
    """Steps of 100 ms every 150, 30 of them loading; between the first two is an evaluation of 40 ms with a wait."""
    evaluation = in_order(span(FORWARD, 105, 145, 0), span(WAIT, 110, 115, 1))
    events = []
    for number in range(num_steps):
        after = late + (190 if number else 0) + 150 * max(number - 1, 0)
        events += one_step(after)
        events += evaluation if number == 0 else []
    loads = [(round((late + 150 * n + 192) * MS) - 31 * MS, round((late + 150 * n + 192) * MS) - MS) for n in range(9)]
    return RankEvents(rank, [ModelEvents(events)], round(-clock * MS), loads)


def test_an_evaluation_counts_nowhere() -> None:
    rank = recorded()
    times = rank_times(rank, rank.models[0])
    # 490 ms from the first step's start to the last one's, less 40; 3 loads of 30 ms, 2 of them in a gap's end
    assert times.period_ms == pytest.approx(150.0)
    assert (times.gradients_ms, times.parameters_ms) == (9.0, 14.0)
    assert times.input_ms == pytest.approx(29.0)
    of_rank = summary([rank], "train.py")["models"][0]["ranks"][0]
    assert of_rank["step_ms"] == pytest.approx(100.0)
    assert "evaluation" not in of_rank["gaps_ms"]
    assert len(of_rank["buckets"]) == 4


def test_two_summaries_are_compared_part_by_part(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary([recorded()], "train.py")))
    before = read_summary(path)
    slower = json.loads(path.read_text())
    slower["models"][0]["ranks"][0]["step_ms"] = 110.0
    slower["models"][0]["ranks"][0]["gaps_ms"]["something new"] = 7.0
    rows = {name: (then, now) for name, then, now in compare(before, slower)}
    assert rows["step"] == pytest.approx((100.0, 110.0))
    assert rows["from step to step"] == pytest.approx((150.0, 150.0))
    assert rows["waits for weights"] == (14.0, 14.0)
    assert rows["something new"] == (0.0, 7.0)
    assert rows["data loading"][0] > 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"models": []}', '{"models": [{"ranks": [{"step_ms": 0}]}]}'])
def test_what_is_no_summary_is_told_so(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SummaryError, match=r"is no summary.json of megastrategy profile"):
        read_summary(path)
