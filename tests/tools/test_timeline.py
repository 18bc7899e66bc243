"""The timeline and its verdicts, as they are made of events: spans, steps, exposed communication, stragglers."""

from __future__ import annotations

import itertools
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megastrategy.core import Event, EventKind
from megastrategy.tools.bottlenecks import RankTimes, rank_times, verdict_of, verdicts
from megastrategy.tools.profile_report import draw
from megastrategy.tools.timeline import Lane, ModelEvents, RankEvents, bucket_times, spans_of, steps_of

from .test_command import Hides

# --- events of made-up steps, in milliseconds -------------------------------------------------------------------------


MS = 1_000_000

FORWARD, BACKWARD, STEP = (
    ("forward_start", "forward_end"),
    ("backward_start", "backward_end"),
    ("step_start", "step_end"),
)

REDUCE, GATHER, WAIT = ("reduce_start", "reduce_end"), ("gather_start", "gather_end"), ("wait_start", "wait_end")

Row = tuple[float, Event]


def at(ms: float, kind: str, index: int = 0, ran: tuple[float, float] | None = None) -> Row:
    ran_ns = (round(ran[0] * MS), round(ran[1] * MS)) if ran else None
    return ms, Event(EventKind(kind), index, round(ms * MS), ran_ns)


def span(pair: tuple[str, str], start: float, end: float, index: int = 0) -> list[Row]:
    return [at(start, pair[0], index), at(end, pair[1], index)]


def collective(
    pair: tuple[str, str], bucket: int, launched: float, ran: tuple[float, float] | None, waited: float
) -> list[Row]:
    return [at(launched, pair[0], bucket), at(waited, pair[1], bucket, ran)]


def in_order(*rows: Sequence[Row], after: float = 0.0) -> list[Event]:
    """As the engine reports them; ``after`` is added to all times (ms)."""
    events = sorted(itertools.chain(*rows), key=lambda row: row[0])
    shift = round(after * MS)
    return [
        Event(
            event.kind,
            event.index,
            event.time_ns + shift,
            (event.ran_ns[0] + shift, event.ran_ns[1] + shift) if event.ran_ns else None,
        )
        for _, event in events
    ]


def one_step(after: float = 0.0) -> list[Event]:
    """100 ms: forward 20, backward 40 with 10 of waiting, step 20, 15 of waiting for parameters; two buckets.

    The second bucket waits for the first one; half of it is hidden. Nothing hides the gathers.
    """
    return in_order(
        span(FORWARD, 0, 20, 1),
        [at(22, "backward_start"), at(62, "backward_end", 1)],
        collective(REDUCE, 0, 30, (30, 45), 53),
        collective(REDUCE, 1, 40, (45, 60), 61),
        span(WAIT, 52.5, 61.5, 0),
        span(STEP, 63, 84),
        collective(GATHER, 1, 85, (85, 92), 92),
        collective(GATHER, 0, 85.5, (92, 99), 99),
        span(WAIT, 86, 100, 1),
        after=after,
    )


def in_ms(spans: Any) -> list[tuple[str, float, float]]:
    return [(span.name, span.start_ns / MS, span.end_ns / MS) for span in spans]


# --- spans, steps and exposed communication ---------------------------------------------------------------------------


def test_lane_has_its_spans() -> None:
    by_lane = {lane: in_ms(span for span in spans_of(one_step()) if span.lane is lane) for lane in Lane}
    assert by_lane[Lane.COMPUTE] == [("forward", 0, 20), ("backward", 22, 62), ("step", 63, 84)]
    assert by_lane[Lane.WAITING] == [("wait for gradients", 52.5, 61.5), ("wait for parameters", 86, 100)]
    assert by_lane[Lane.COMMUNICATION] == [
        ("reduce bucket 0", 30, 45),
        ("reduce bucket 1", 45, 60),
        ("gather bucket 1", 85, 92),
        ("gather bucket 0", 92, 99),
    ]


def test_step_ends_with_its_parameters() -> None:
    [step] = steps_of(one_step())
    assert step.alone_ms == 100.0
    times = rank_times(RankEvents(0, []), ModelEvents(one_step()))
    assert (times.gradients_ms, times.parameters_ms, times.exposed_share) == (9.0, 14.0, 0.23)


def test_step_has_its_microbatches() -> None:
    silent = in_order(span(FORWARD, 0, 20, 1), span(BACKWARD, 22, 50))
    [step] = steps_of([*silent, *one_step(after=60)])
    assert (step.alone_ms, step.exposed_gradients_ns + step.exposed_parameters_ns) == (160.0, 23 * MS)


def test_late_gather_counts_in_the_next_step() -> None:
    """``overlap_param_gather=True``."""
    lazy = in_order(
        [at(0, "forward_start", 1), at(12, "forward_end", 1)],
        span(WAIT, 3, 10, 1),
        collective(GATHER, 0, -11, (-11, 9), 10),
        span(BACKWARD, 12, 30),
        span(STEP, 30, 40),
    )
    shifted = [Event(e.kind, e.index, e.time_ns + 50 * MS) for e in lazy]  # its gather starts in this step
    first, second = steps_of(sorted([*lazy, *shifted], key=lambda event: event.time_ns))
    assert (first.alone_ms, first.exposed_parameters_ns, second.exposed_parameters_ns) == (40.0, 7 * MS, 7 * MS)


def test_step_of_plain_optimizer_ends_with_backward() -> None:
    def microbatch(after: float, synchronised: int) -> list[Event]:
        backward = [at(12, "backward_start"), at(30, "backward_end", synchronised)]
        return in_order(span(FORWARD, 0, 10, 1), backward, span(WAIT, 25, 29, 0), after=after)

    events = [*microbatch(0, 0), *microbatch(40, 1), *microbatch(100, 0), *microbatch(150, 1)]
    assert [step.alone_ms for step in ModelEvents(events, has_optimizer=False).steps] == [70.0, 80.0]
    assert ModelEvents(events).steps == []


def test_bucket_is_hidden_without_a_wait() -> None:
    times = bucket_times(ModelEvents([*one_step(), *one_step(after=200)], (4096, 8192), (1024, 2048)))
    assert [(t.what, t.bucket, t.count, t.nbytes) for t in times] == [
        ("reduce", 0, 2, 4096),
        ("reduce", 1, 2, 8192),
        ("gather", 0, 2, 1024),
        ("gather", 1, 2, 2048),
    ]
    assert [(t.ran_ms, t.launch_to_done_ms) for t in times] == [(15, 15), (15, 20), (7, 13.5), (7, 7)]
    # of 15 ms the last 7.5 are waited for; of the gather's 7 the first is not
    assert [t.hidden_share for t in times] == pytest.approx([1.0, 0.5, 0.0, 1 / 7])


# --- verdicts ---------------------------------------------------------------------------------------------------------


def times(rank: int = 0, input_ms: float = 0.0, gradients_ms: float = 0.0, parameters_ms: float = 0.0) -> RankTimes:
    return RankTimes(rank, [100.0], input_ms, gradients_ms, parameters_ms)


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
def test_largest_wait_names_the_verdict(ranks: list[RankTimes], kind: str, says: str) -> None:
    verdict = verdict_of(ranks)
    assert verdict.kind == kind
    assert says in verdict.sentence
    assert "\n" not in verdict.sentence


def test_unsteady_run_names_no_cause() -> None:
    """Nor does one rank's spread pass for the others' waits; an odd step in eight is no spread."""
    unsteady = RankTimes(1, [60, 80, 100, 120, 140, 160, 180, 200], 0.0, 40.0, 0.0)
    verdict = verdict_of([times(gradients_ms=60), unsteady])
    assert verdict.kind == "unsteady"
    assert "the middle half of the steps of rank 1 took 95.0 to 165.0 ms" in verdict.sentence
    steady = RankTimes(1, [100.0] * 7 + [500.0], 0.0, 40.0, 0.0)
    assert verdict_of([times(gradients_ms=60), steady]).kind == "link-bound"
    few = RankTimes(1, [60.0, 200.0, 400.0], 0.0, 40.0, 0.0)
    assert verdict_of([few]).kind == "link-bound", "too few steps to tell"


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
        found.append(RankTimes(rank, [100.0], 0.0, 30.0 if rank not in late_ms else 1.0, 0.0, launches))
    return found


def test_straggler_is_told_with_its_delay() -> None:
    verdict = verdict_of(launched({3: 18.0}))
    assert verdict.kind == "straggler"
    assert "rank 3 was last in 41 of 50 buckets, by 18.0 ms of a step of 100.0" in verdict.sentence
    assert "look at its device" in verdict.sentence


def test_different_clocks_make_no_straggler() -> None:
    """Rank 2's clock is 500 ms ahead, as another machine's may be: only the ends of collectives tell."""
    verdict = verdict_of(launched({3: 18.0}, clock_ms=(0, 0, 500, -70)))
    assert verdict.lateness is not None
    assert (verdict.lateness.rank, verdict.lateness.num_last) == (3, 41)
    assert verdict.lateness.late_ms == pytest.approx(18.0)
    assert verdict_of(launched({}, clock_ms=(0, 0, 500, -70))).kind == "link-bound"


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


def test_evaluation_counts_nowhere() -> None:
    rank = recorded()
    times = rank_times(rank, rank.models[0])
    # 490 ms from the first step's start to the last one's, less 40; 3 loads of 30 ms, each until a step begins
    assert times.periods_ms == pytest.approx([150.0, 150.0, 150.0])
    assert (times.gradients_ms, times.parameters_ms) == (9.0, 14.0)
    assert times.input_ms == pytest.approx(30.0)


def test_record_has_the_verdict_of_its_ranks() -> None:
    """Rank 1 launches each bucket 12 ms after rank 0, and they end 12 ms later there: it is a clock that differs."""
    [verdict] = verdicts([recorded(), recorded(1, 12.0)])
    assert verdict.kind == "input-bound"
    assert verdicts([RankEvents(0, [ModelEvents([])])]) == []


# --- the picture ------------------------------------------------------------------------------------------------------


def test_picture_without_matplotlib_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hides("matplotlib"), *sys.meta_path])
    (tmp_path / "timeline.png").write_text("of an older run")
    assert "pip install 'megastrategy[plot]'" in draw([RankEvents(0, [ModelEvents(one_step())])], tmp_path)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert [name.split(">")[0] for name in project["optional-dependencies"]["plot"]] == ["matplotlib"]
    assert not list(tmp_path.iterdir())
