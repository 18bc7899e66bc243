"""The timeline: what is made of events, and ``megastrategy profile`` on scripts that know nothing of it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from matplotlib import image
from torch.distributed import ProcessGroup

from megastrategy.core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Event,
    EventKind,
    make_collectives,
)
from megastrategy.tools.commands import root
from megastrategy.tools.gaps import EVALUATION, LOADING, Gap, gap_times, gaps_of
from megastrategy.tools.pictures import chrome_trace, plot
from megastrategy.tools.profile_report import has_steps, why_nothing, write_files
from megastrategy.tools.profiling import Recording
from megastrategy.tools.timeline import (
    Lane,
    ModelEvents,
    RankEvents,
    average,
    bucket_times,
    spans_of,
    steps_of,
)
from tests.support.patience import HANG_S

from ..support.doubles import DelayingCollectives
from ..support.models import two_layers
from ..support.ranks import run_ranks
from .test_command import Hides

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
    """As the engine tells them; ``after`` is added to all times (ms)."""
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
    """100 ms: forward 20, backward 40 of which 10 are waiting, step 20, 15 of waiting for parameters; two buckets.

    The second bucket stands behind the first one; half of it is hidden. Nothing hides the gathers.
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


# --- spans -----------------------------------------------------------------------------------------------------------


def test_each_lane_has_its_spans_and_collectives_are_shown_when_they_ran() -> None:
    by_lane = {lane: in_ms(span for span in spans_of(one_step()) if span.lane is lane) for lane in Lane}
    assert by_lane[Lane.COMPUTE] == [("forward", 0, 20), ("backward", 22, 62), ("step", 63, 84)]
    assert by_lane[Lane.WAITING] == [("wait for gradients", 52.5, 61.5), ("wait for parameters", 86, 100)]
    assert by_lane[Lane.COMMUNICATION] == [
        ("reduce bucket 0", 30, 45),
        ("reduce bucket 1", 45, 60),
        ("gather bucket 1", 85, 92),
        ("gather bucket 0", 92, 99),
    ]


def test_a_backend_that_does_not_tell_when_it_ran_is_shown_from_launch_to_wait() -> None:
    events = in_order(collective(REDUCE, 0, 10, None, 30), collective(REDUCE, 1, 20, (21, 22), 30))
    assert in_ms(spans_of(events)) == [("reduce bucket 0", 10, 30), ("reduce bucket 1", 21, 22)]
    assert [times.ran_ms for times in bucket_times(ModelEvents(events))] == [None, 1.0]


def test_what_an_exception_cut_off_is_left_out_and_the_next_is_whole() -> None:
    failed = [at(0, "forward_start", 1), at(5, "forward_start", 1), at(8, "backward_start"), at(9, "reduce_start", 0)]
    again = [*span(FORWARD, 10, 20, 1), *span(BACKWARD, 20, 30), *collective(REDUCE, 0, 25, (26, 27), 29)]
    assert in_ms(spans_of(in_order(failed, again))) == [
        ("forward", 10, 20),
        ("reduce bucket 0", 26, 27),
        ("backward", 20, 30),
    ]


def test_an_end_without_a_start_is_left_out() -> None:
    """Recording may begin while a gather is on its way."""
    assert in_ms(spans_of(in_order([at(3, "gather_end", 0), at(3, "wait_end", 1)], span(STEP, 5, 6)))) == [
        ("step", 5, 6)
    ]


def test_a_bucket_that_is_reduced_twice_in_a_backward_has_two_spans() -> None:
    """Late gradients: [Note: gradients that come twice] in core/reducer.py."""
    events = in_order(collective(REDUCE, 0, 0, (0, 4), 10), collective(REDUCE, 0, 11, (11, 13), 14))
    assert in_ms(spans_of(events)) == [("reduce bucket 0", 0, 4), ("reduce bucket 0", 11, 13)]
    assert [(times.count, times.ran_ms) for times in bucket_times(ModelEvents(events))] == [(2, 3.0)]


# --- steps and exposed communication ---------------------------------------------------------------------------------


def test_a_step_lasts_until_the_parameters_are_there_and_waiting_in_it_is_exposed() -> None:
    [step] = steps_of(one_step())
    assert (step.step_ms, step.exposed_ms) == (100.0, 23.0)
    mean = average([step])
    assert (mean.exposed_gradients_ms, mean.exposed_parameters_ms, mean.exposed_share) == (9.0, 14.0, 0.23)


def test_what_lies_between_steps_belongs_to_none() -> None:
    validation = in_order(span(FORWARD, 130, 180, 0))
    events = [*one_step(), *validation, *one_step(after=200), *one_step(after=1000)]
    assert [step.step_ms for step in steps_of(events)] == [100.0] * 3
    assert average(steps_of(events)).exposed_share == pytest.approx(0.23)
    assert in_ms(spans_of(validation)) == [("forward without gradients", 130, 180)]


def test_accumulated_microbatches_belong_to_the_step_that_uses_them() -> None:
    silent = in_order(span(FORWARD, 0, 20, 1), span(BACKWARD, 22, 50))
    [step] = steps_of([*silent, *one_step(after=60)])
    assert (step.step_ms, average([step]).exposed_share) == (160.0, 23 / 160)


def test_parameters_that_the_next_forward_waits_for_count_in_the_step_of_that_forward() -> None:
    """``overlap_param_gather="forward"``."""
    lazy = in_order(
        [at(0, "forward_start", 1), at(12, "forward_end", 1)],
        span(WAIT, 3, 10, 1),
        collective(GATHER, 0, -11, (-11, 9), 10),
        span(BACKWARD, 12, 30),
        span(STEP, 30, 40),
    )
    shifted = [Event(e.kind, e.index, e.time_ns + 50 * MS) for e in lazy]  # its gather starts in this step
    first, second = steps_of(sorted([*lazy, *shifted], key=lambda event: event.time_ns))
    assert (first.step_ms, first.exposed_parameters_ns, second.exposed_parameters_ns) == (40.0, 7 * MS, 7 * MS)


def test_manual_optimization_runs_all_of_a_step_inside_a_forward() -> None:
    inside = [*span(BACKWARD, 10, 30), *span(WAIT, 25, 29, 0), *span(STEP, 31, 40), *span(WAIT, 41, 45, 1)]
    events = in_order(span(FORWARD, 0, 50, 1), inside)
    [step] = steps_of([*events, *in_order(span(FORWARD, 60, 70, 1))])
    assert (step.step_ms, step.exposed_ms) == (50.0, 8.0)
    second = [*span(BACKWARD, 50, 60), *span(WAIT, 55, 59, 0), *span(STEP, 61, 70)]
    steps = steps_of(in_order(span(FORWARD, 0, 80, 1), inside, second))
    assert [(step.step_ms, step.exposed_ms) for step in steps] == [(45.0, 8.0), (30.0, 4.0)], "one for each optimizer"


@pytest.mark.parametrize("length", range(len(one_step())))
def test_an_interrupted_run_has_the_steps_that_were_whole(length: int) -> None:
    """Whatever the event that came last; after the optimizer's step only the wait for parameters is missing."""
    cut = one_step(after=200)[:length]
    steps = steps_of([*one_step(), *cut])
    assert steps[0] == steps_of(one_step())[0]
    has_stepped = any(event.kind is EventKind.STEP_END for event in cut)
    assert len(steps) == 1 + has_stepped
    json.dumps(chrome_trace([RankEvents(0, [ModelEvents([*one_step(), *cut])])]))


def test_a_plain_optimizer_tells_nothing_so_its_steps_end_with_a_synchronised_backward() -> None:
    def microbatch(after: float, synchronised: int) -> list[Event]:
        backward = [at(12, "backward_start"), at(30, "backward_end", synchronised)]
        return in_order(span(FORWARD, 0, 10, 1), backward, span(WAIT, 25, 29, 0), after=after)

    events = [*microbatch(0, 0), *microbatch(40, 1), *microbatch(100, 0), *microbatch(150, 1)]
    assert [step.step_ms for step in ModelEvents(events, has_optimizer=False).steps] == [70.0, 80.0]
    assert ModelEvents(events).steps == []


def test_no_steps_have_no_average() -> None:
    assert steps_of([]) == steps_of(in_order(span(FORWARD, 0, 1, 1))) == steps_of(in_order(span(STEP, 0, 1))) == []
    with pytest.raises(ValueError, match="no whole step"):
        average([])


def test_a_bucket_is_hidden_where_its_rank_did_not_wait() -> None:
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


# --- gaps ------------------------------------------------------------------------------------------------------------


def in_ms_of(gaps: list[Gap]) -> list[tuple[str, float, float]]:
    return [(gap.name, gap.start_ns / MS, gap.end_ns / MS) for gap in gaps]


def test_every_gap_has_a_name() -> None:
    """By what is before and after it; batches are cut out, and an evaluation is one gap from first to last forward."""
    silent = in_order(span(FORWARD, 0, 20, 1), span(BACKWARD, 22, 50), after=-60)
    evaluation = in_order(span(FORWARD, 130, 140, 0), span(WAIT, 131, 133, 1), span(FORWARD, 170, 180, 0))
    model = ModelEvents([*silent, *one_step(), *evaluation, *one_step(after=200)])
    loads = [(round(start * MS), round(end * MS)) for start, end in [(-9, -2), (101, 125), (141, 169), (185, 190)]]
    assert in_ms_of(gaps_of(model, loads)) == [
        ("loss", -40, -38),
        ("between microbatches: hooks", -10, -9),
        ("data loading", -9, -2),
        ("between microbatches: hooks", -2, 0),
        ("loss", 20, 22),
        ("clipping, hooks", 62, 63),
        ("optimizer", 84, 86),
        ("between steps: hooks, logging", 100, 101),
        ("data loading", 101, 125),
        ("between steps: hooks, logging", 125, 130),
        ("evaluation", 130, 180),
        ("between steps: hooks, logging", 180, 185),
        ("data loading", 185, 190),
        ("between steps: hooks, logging", 190, 200),
        ("loss", 220, 222),
        ("clipping, hooks", 262, 263),
        ("optimizer", 284, 286),
    ]
    longest, *_ = gap_times(gaps_of(model, loads))
    assert (longest.name, longest.count, longest.median_ms, longest.total_ms) == ("evaluation", 1, 50.0, 50.0)
    plain = in_order(span(FORWARD, 0, 10, 1), span(BACKWARD, 11, 20, 0), span(FORWARD, 30, 40, 1))
    assert in_ms_of(gaps_of(ModelEvents(plain, has_optimizer=False))) == [
        ("loss", 10, 11),
        ("plain optimizer, hooks, logging", 20, 30),
    ]


def test_manual_optimization_leaves_no_gap_inside_its_forward() -> None:
    inside = [*span(FORWARD, 5, 8, 0), *span(BACKWARD, 10, 30), *span(STEP, 31, 40)]
    assert gaps_of(ModelEvents(in_order(span(FORWARD, 0, 50, 1), inside))) == []


def test_an_evaluation_between_microbatches_is_no_time_of_the_step() -> None:
    """``val_check_interval`` counts batches, not steps."""
    silent = in_order(span(FORWARD, 0, 20, 1), span(BACKWARD, 22, 50))
    evaluation = in_order(span(FORWARD, 60, 100, 0), span(FORWARD, 110, 160, 0))
    [step] = steps_of([*silent, *evaluation, *one_step(after=170)])
    assert (step.step_ms, average([step]).exposed_share) == (170.0, 23 / 170)


# --- Chrome trace and picture ----------------------------------------------------------------------------------------


def slices(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    return threads


def names_of(trace: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == what}


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Two slices of a thread are apart, or one lies in the other: anything else no viewer can draw."""
    for one, other in itertools.combinations(sorted(events, key=lambda e: (e["ts"], -e["dur"])), 2):
        assert one["dur"] >= 0
        end = one["ts"] + one["dur"]
        assert other["ts"] >= end - 1e-6 or other["ts"] + other["dur"] <= end + 1e-6, (one, other)


def test_ranks_are_processes_of_one_trace_on_one_clock() -> None:
    """Rank 1's clock began 7 ms later: it tells smaller numbers for the same moments."""
    model = ModelEvents([*one_step(), *one_step(after=200)], (4096, 8192), (1024, 2048), num_skipped_steps=5)
    ranks = [RankEvents(0, [model], 0), RankEvents(1, [ModelEvents(one_step(after=-7 + 3))], 7 * MS)]
    trace = json.loads(json.dumps(chrome_trace(ranks)))
    assert names_of(trace, "process_name") == {(0, 0): "rank 0", (1, 0): "rank 1"}
    threads, lanes = slices(trace), names_of(trace, "thread_name")
    assert [lanes[0, tid] for tid in range(5)] == ["steps", "compute", "communication", "waiting", "gaps"]
    assert [(e["name"], e["ts"], e["dur"]) for e in threads[0, 0]] == [
        ("training step 5", 0.0, 100e3),
        ("training step 6", 200e3, 100e3),
    ]
    assert [e["args"] for e in threads[0, 0]] == [{"exposed_ms": 23.0, "exposed_share": 0.23}] * 2
    assert [e["ts"] for e in threads[1, 1]] == [3e3, 25e3, 66e3], "what the others call 3 ms later"
    reduced = next(e for e in threads[0, 2] if e["name"] == "reduce bucket 1")
    assert (reduced["ts"], reduced["dur"], reduced["args"]) == (
        45e3,
        15e3,
        {"launch_to_done_ms": 20.0, "bytes": 8192},
    )
    for events in threads.values():
        assert_nested(events)


def test_collectives_that_overlap_get_threads_of_their_own() -> None:
    launched = [collective(REDUCE, bucket, 10 * bucket, None, 25 + 10 * bucket) for bucket in range(5)]
    trace = chrome_trace([RankEvents(0, [ModelEvents(in_order(*launched))])])
    threads = slices(trace)
    assert [len(events) for events in threads.values()] == [2, 2, 1], "as few as it takes"
    for events in threads.values():
        assert_nested(events)


def test_several_models_of_a_rank_are_told_apart() -> None:
    trace = chrome_trace([RankEvents(0, [ModelEvents(one_step()), ModelEvents(one_step(after=50))])])
    lanes = names_of(trace, "thread_name")
    assert lanes[0, 1] == "model 0: compute"
    assert lanes[0, 6] == "model 1: compute"
    assert all(len({e["cat"] for e in events}) == 1 for events in slices(trace).values())


def test_a_record_reads_as_it_was_written() -> None:
    record = RankEvents(3, [ModelEvents(one_step(), [4096, 8192], [1024, 2048], 5)], 17, ((3, 9), (20, 21)))
    assert RankEvents.from_json(json.loads(json.dumps(record.to_json()))) == record


def red_pixels(path: Path) -> int:
    pixels = image.imread(path)[..., :3]
    return int((abs(pixels - [0xC6 / 255, 0x28 / 255, 0x28 / 255]).max(axis=-1) < 0.02).sum())


def test_the_picture_is_red_where_the_rank_waits(tmp_path: Path) -> None:
    """Also over the backward in which it does; the area is as the time."""
    is_wait = {event: event.kind in (EventKind.WAIT_START, EventKind.WAIT_END) for event in one_step()}
    end = Event(EventKind.LAYOUT_EXTENDED, 0, 100 * MS)  # draws nothing, and keeps the step's length

    def area(*waits_for: int) -> int:
        events = [event for event in one_step() if not is_wait[event] or event.index in waits_for]
        path = tmp_path / "timeline.png"
        plot([RankEvents(0, [ModelEvents([*events, end])])], path)
        return red_pixels(path)

    legend = area()
    gradients, parameters = area(0) - legend, area(1) - legend
    assert parameters > 1000
    assert gradients / parameters == pytest.approx(9 / 14, rel=0.05)
    assert area(0, 1) - legend == pytest.approx(gradients + parameters, rel=0.02)


def test_an_evaluation_does_not_fill_the_picture(tmp_path: Path) -> None:
    """It takes ten times a step here, between the last two; the two before it are drawn in its place."""

    def drawn(*events: list[Event]) -> bytes:
        path = tmp_path / "timeline.png"
        plot([RankEvents(0, [ModelEvents([event for part in events for event in part])])], path)
        return path.read_bytes()

    first, second, third = one_step(), one_step(after=120), one_step(after=1300)
    evaluation = in_order(span(FORWARD, 230, 1290, 0))
    assert red_pixels_of(drawn(first, second, evaluation, third), tmp_path) == pytest.approx(
        red_pixels_of(drawn(first, second), tmp_path), rel=0.05
    )


def red_pixels_of(content: bytes, folder: Path) -> int:
    (folder / "again.png").write_bytes(content)
    return red_pixels(folder / "again.png")


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no whole step"):
        plot([RankEvents(0, [ModelEvents(in_order(span(FORWARD, 0, 1, 1)))])], tmp_path / "none.png")


def test_without_matplotlib_all_but_the_picture_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hides("matplotlib"), *sys.meta_path])
    (tmp_path / "timeline.png").write_text("of an older run")
    trace, picture = write_files([RankEvents(0, [ModelEvents(one_step())])], tmp_path)
    assert "pip install 'megastrategy[plot]'" in picture
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert [name.split(">")[0] for name in project["optional-dependencies"]["plot"]] == ["matplotlib"]
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json"}
    assert "perfetto" in trace


# --- what the engine tells -------------------------------------------------------------------------------------------


def test_a_handle_tells_when_its_collective_ran_not_when_it_was_waited_for() -> None:
    """The first is over when the second is, since they run in order; waiting for it comes later."""

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = make_collectives(group, torch.device("cpu"))
        clock = [Event(EventKind.WAIT_START, 0).time_ns]
        first, second = (collectives.reduce_scatter(torch.ones(4096), 0.5) for _ in range(2))
        assert first.ran_ns is None, "not waited for"
        second.wait()
        clock.append(Event(EventKind.WAIT_START, 0).time_ns)
        first.wait()
        assert first.ran_ns is not None
        assert second.ran_ns is not None
        assert clock[0] <= first.ran_ns[0] < first.ran_ns[1] <= second.ran_ns[0] < second.ran_ns[1] <= clock[1]
        collectives.close()

    run_ranks(2, run)


def train(model: Any, optimizer: Any, num_steps: int) -> None:
    for number in range(num_steps):
        with model.no_sync():
            model(torch.full((2, 10), 0.1 * number)).square().mean().backward()
        model(torch.full((2, 10), 0.2 * number)).square().mean().backward()
        optimizer.step()


def test_a_recording_is_of_one_layout(tmp_path: Path) -> None:
    """The step in which buckets are filled anew is skipped, whatever was to be; the steps asked for come after it."""

    def run(rank: int, group: ProcessGroup) -> list[int]:
        class OfRank(DistributedDataParallel):
            """Ranks are threads here, so each has a class of its own in place of the process's."""

        recording = Recording(tmp_path, rank, skip=0, num_steps=3)
        recording.install(OfRank)
        module = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(6)))
        module.forward = lambda x: functools.reduce(lambda x, layer: layer(x), reversed(module), x)  # type: ignore
        model = OfRank(module, DistributedDataParallelConfig(bucket_size=150), process_group=group)
        before = model.layout
        train(model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), 5)
        recording.finish()
        assert model.layout != before
        return [4 * bucket.numel for bucket in model.layout.buckets]

    sent_bytes = run_ranks(2, run)[0]
    for rank in range(2):
        [model] = RankEvents.from_json(json.loads((tmp_path / f"events.rank{rank}.json").read_text())).models
        assert len(model.steps) == 3
        assert model.num_skipped_steps == 1
        assert list(model.reduced_bytes) == sent_bytes
        assert [times.count for times in bucket_times(model)] == [3] * 2 * len(sent_bytes)


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({}, DistributedOptimizer),
        ({"overlap_param_gather": "forward"}, DistributedOptimizer),
        ({"use_distributed_optimizer": False}, DistributedOptimizer),
        ({"use_distributed_optimizer": False}, None),
    ],
    ids=["reduce-scatter", "gather under forward", "all-reduce", "plain optimizer"],
)
def test_a_recording_has_the_steps_that_were_asked_for_of_whatever_is_wrapped(
    options: dict[str, Any], optimizer: Any, tmp_path: Path
) -> None:
    """With the last step's gathers, though the next forward waits for them; also where the script has a listener."""
    delay_s = 0.03
    heard: list[Event] = []

    def run(rank: int, group: ProcessGroup) -> int:
        class OfRank(DistributedDataParallel):
            """Ranks are threads here, so each has a class of its own in place of the process's."""

        recording = Recording(tmp_path, rank, skip=2, num_steps=3)
        recording.install(OfRank)
        collectives = DelayingCollectives(group, delay_s)
        listener = heard.append if rank == 0 else None
        config = DistributedDataParallelConfig(bucket_size=1, **options)
        model = OfRank(two_layers(), config, collectives=collectives, listener=listener)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer(sgd, model) if optimizer else sgd, 7)
        recording.finish()
        return len(model.layout.buckets)

    num_buckets = run_ranks(2, run)[0]
    assert sum(event.kind is EventKind.BACKWARD_END for event in heard) == 14, "the script's own listener hears all"
    whats = ["reduce", "gather"] if options.get("use_distributed_optimizer", True) else ["reduce"]
    for rank in range(2):
        record = RankEvents.from_json(json.loads((tmp_path / f"events.rank{rank}.json").read_text()))
        [model] = record.models
        steps = model.steps
        assert len(steps) == 3
        assert model.num_skipped_steps == 2
        assert not [event for event in model.events if event.kind is EventKind.GRAD_READY]
        assert all(step.exposed_gradients_ns > 0.9e9 * delay_s for step in steps), "the last bucket's, at least"
        names = [span.name for span in spans_of(model.events)]
        num_updates = 3 if optimizer else 0
        assert [names.count(name) for name in ("forward", "backward", "step")] == [7, 6, num_updates]
        assert [(times.what, times.count) for times in bucket_times(model)] == [
            (what, 3) for what in whats for _ in range(num_buckets)
        ]
        for each in spans_of(model.events):
            assert each.launched_ns <= each.start_ns <= each.end_ns, each
            assert each.has_run_times == (each.lane is Lane.COMMUNICATION)
        for events in slices(chrome_trace([record])).values():
            assert_nested(events)


# --- the command -----------------------------------------------------------------------------------------------------

PLAIN_LOOP = """
import sys

import torch
import torch.distributed as dist

from its_neighbour import WIDTH
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

if __name__ == "__main__":
    assert sys.argv[1:] == ["--steps", "7"], sys.argv
    dist.init_process_group("gloo")
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=1))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    sys.exit(3)
"""

LIGHTNING = """
import lightning.pytorch as pl
import torch


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(strategy="megatron_ddp", accelerator="cpu", devices=2, max_steps=6, **options)
    trainer.fit(Net(), data, data)
"""


def profile(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    ours = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-c", "from megastrategy.tools.cli import main; main()", "profile", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=HANG_S
    )


def read_records(folder: Path) -> list[RankEvents]:
    return [RankEvents.from_json(json.loads(path.read_text())) for path in sorted(folder.glob("events.rank*.json"))]


@pytest.mark.long
def test_a_plain_loop_is_profiled_as_it_is_and_shown_even_if_it_fails_later(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(PLAIN_LOOP)
    (tmp_path / "scripts" / "its_neighbour.py").write_text("WIDTH = 64\n")
    done = profile(tmp_path, "--steps", "3", "--skip", "2", "scripts/train.py", "--steps", "7")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ended with exit code 3" in done.stderr.splitlines()[-1]
    ranks = read_records(tmp_path / "profile")
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        [model] = rank.models
        steps = model.steps
        assert (len(steps), model.num_skipped_steps) == (3, 2)
        assert f"{average(steps).exposed_share:.1%}" in done.stdout
        sizes = [4 * 64 * 64, 4 * 128, 4 * 128, 4 * 128]  # fp32, each tensor a bucket of whole 128s
        told = sorted((times.what, times.count, times.nbytes) for times in bucket_times(model))
        assert told == sorted((what, 3, size) for what in ("reduce", "gather") for size in sizes)
    trace = json.loads((tmp_path / "profile" / "trace.json").read_text())
    assert {pid for pid, _ in slices(trace)} == {0, 1}
    for events in slices(trace).values():
        assert_nested(events)
    first, second = (slices(trace)[rank, 0] for rank in (0, 1))
    for one, other in zip(first, second, strict=True):
        assert one["ts"] < other["ts"] + other["dur"], "a step ends on no rank before all have begun it"
        assert other["ts"] < one["ts"] + one["dur"]
    assert (tmp_path / "profile" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_lightning_script_is_profiled_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    done = profile(tmp_path, "--steps", "3", "--skip", "1", "--out", "made/here", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = read_records(tmp_path / "made" / "here")
    assert [len(rank.models) for rank in ranks] == [1, 1]
    for rank in ranks:
        assert len(rank.models[0].steps) == 3
        names = [span.name for span in spans_of(rank.models[0].events)]
        assert [names.count(name) for name in ("backward", "step", "reduce bucket 0", "gather bucket 0")] == [3] * 4
        assert rank.loads
        gaps = gaps_of(rank.models[0], rank.loads)
        assert {LOADING, "loss"} <= {gap.name for gap in gaps}
        assert EVALUATION not in {gap.name for gap in gaps if gap.start_ns < rank.models[0].steps[0].start_ns}
    for what in ("exposed share", "hidden share", "gaps, on rank 0", LOADING, "timeline.png", "trace.json: open it"):
        assert what in done.stdout
    assert len(done.stdout.split("exposed share")[1].splitlines()[1].split()) == 7, "a row of rank 0"


def test_what_nothing_was_recorded_of_is_told_with_the_reason(tmp_path: Path) -> None:
    assert "wrapped no model" in why_nothing([RankEvents(0, [])], 5)
    few = [RankEvents(0, [ModelEvents([], num_skipped_steps=3)])]
    assert why_nothing(few, 5) == "no step was recorded: the script made 3, and the first 5 are skipped: lower --skip"
    assert why_nothing([RankEvents(0, [ModelEvents([])])], 0).endswith("the script made none")
    assert not has_steps(few)
    missing = CliRunner().invoke(root, ["profile", str(tmp_path / "none.py")])
    assert missing.exit_code == 2
    assert f"{tmp_path}/none.py does not exist" in missing.stderr
