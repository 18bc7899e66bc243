"""What the engine's events say about time: spans, exposed communication, a Chrome trace and a picture.

Pure functions over the events of one rank (``core.events``), but for :func:`plot`. Times are the host's, in nanoseconds
of the rank's own clock; a rank's ``clock_offset_ns`` takes them to a clock that all ranks share.

[Note: what a step is]
From the first forward that trains (or backward, if no forward is seen) to the last event before the next forward or
backward after the optimizer's step: with the wait for new weights, without what lies between steps (data loading,
validation, logging). Microbatches that are accumulated belong to the step that uses them. A plain optimizer, which may
step after an all-reduce, tells nothing: there the synchronised backward is taken for it.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import Event, EventKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Interval = tuple[int, int]


class Lane(enum.Enum):
    """Where a span is drawn."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    WAITING = "waiting"


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        kind: the event that it starts with.
        index: that event's.
        start_ns, end_ns: of a collective, when it ran if the backend tells, else from its launch until somebody had
            waited for it.
        launched_ns: when the engine asked for it; of all but collectives ``start_ns``.
        has_run_times: whether it is a collective of which the backend told when it ran.
    """

    kind: EventKind
    index: int
    start_ns: int
    end_ns: int
    launched_ns: int
    has_run_times: bool = False

    @property
    def lane(self) -> Lane:
        return _LANES[self.kind]

    @property
    def name(self) -> str:
        if self.kind is EventKind.FORWARD_START:
            return "forward" if self.index else "forward without gradients"
        if self.kind is EventKind.WAIT_START:
            return "wait for parameters" if self.index else "wait for gradients"
        if self.lane is Lane.COMMUNICATION:
            return f"{_COLLECTIVES[self.kind]} bucket {self.index}"
        return str(self.kind.value).removesuffix("_start")


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step, see [Note: what a step is]; waiting in it is its exposed communication."""

    start_ns: int
    end_ns: int
    exposed_gradients_ns: int
    exposed_parameters_ns: int

    @property
    def step_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6

    @property
    def exposed_ms(self) -> float:
        return (self.exposed_gradients_ns + self.exposed_parameters_ns) / 1e6


@dataclasses.dataclass(frozen=True)
class Average:
    """Over steps; ``exposed_share`` is the part, from 0 to 1, of the steps' time that was spent waiting."""

    num_steps: int
    step_ms: float
    exposed_gradients_ms: float
    exposed_parameters_ms: float

    @property
    def exposed_ms(self) -> float:
        return self.exposed_gradients_ms + self.exposed_parameters_ms

    @property
    def exposed_share(self) -> float:
        return self.exposed_ms / self.step_ms if self.step_ms > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class BucketTimes:
    """One bucket's reductions, or its gathers; medians over their number.

    Attributes:
        what: "reduce" or "gather".
        nbytes: of the bucket, in the dtype that is sent; 0 if it is not known.
        ran_ms: how long it took, waiting for slower ranks included; None if the backend does not tell (CUDA).
        launch_to_done_ms: with the time that it stood behind other collectives.
        hidden_share: the part, from 0 to 1, of its time in which the rank did not wait.
    """

    what: str
    bucket: int
    count: int
    nbytes: int
    ran_ms: float | None
    launch_to_done_ms: float
    hidden_share: float


@dataclasses.dataclass(frozen=True)
class ModelEvents:
    """What one wrapper told its listener.

    Attributes:
        reduced_bytes, gathered_bytes: by bucket.
        num_skipped_steps: how many steps it had done before the first of these events.
        has_optimizer: whether a DistributedOptimizer steps it, and tells.
    """

    events: Sequence[Event]
    reduced_bytes: Sequence[int] = ()
    gathered_bytes: Sequence[int] = ()
    num_skipped_steps: int = 0
    has_optimizer: bool = True

    @property
    def steps(self) -> list[Step]:
        return steps_of(self.events, self.has_optimizer)


@dataclasses.dataclass(frozen=True)
class RankEvents:
    """What all wrappers of one rank told; ``clock_offset_ns`` is added to its times to compare them with others'."""

    rank: int
    models: Sequence[ModelEvents]
    clock_offset_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        models = [
            {
                **dataclasses.asdict(model),
                "events": [[event.kind.value, event.index, event.time_ns, event.ran_ns] for event in model.events],
            }
            for model in self.models
        ]
        return {**dataclasses.asdict(dataclasses.replace(self, models=())), "models": models}

    @staticmethod
    def from_json(content: dict[str, Any]) -> RankEvents:
        """What :meth:`to_json` wrote."""
        models = [
            ModelEvents(
                **{
                    **model,
                    "events": [
                        Event(EventKind(kind), index, time_ns, tuple(ran_ns) if ran_ns else None)
                        for kind, index, time_ns, ran_ns in model["events"]
                    ],
                }
            )
            for model in content["models"]
        ]
        return RankEvents(**{**content, "models": models})


_STARTS = {
    EventKind.FORWARD_END: EventKind.FORWARD_START,
    EventKind.BACKWARD_END: EventKind.BACKWARD_START,
    EventKind.STEP_END: EventKind.STEP_START,
    EventKind.REDUCE_END: EventKind.REDUCE_START,
    EventKind.GATHER_END: EventKind.GATHER_START,
    EventKind.WAIT_END: EventKind.WAIT_START,
}
_LANES = {
    EventKind.FORWARD_START: Lane.COMPUTE,
    EventKind.BACKWARD_START: Lane.COMPUTE,
    EventKind.STEP_START: Lane.COMPUTE,
    EventKind.REDUCE_START: Lane.COMMUNICATION,
    EventKind.GATHER_START: Lane.COMMUNICATION,
    EventKind.WAIT_START: Lane.WAITING,
}
_COLLECTIVES = {EventKind.REDUCE_START: "reduce", EventKind.GATHER_START: "gather"}
BEGINS_STEP = (EventKind.FORWARD_START, EventKind.BACKWARD_START)
"""A step lasts until the first of these after the event that completes it."""


def completes_step(event: Event, has_optimizer: bool) -> bool:
    """Whether what comes until the next forward or backward is the rest of a step."""
    if has_optimizer:
        return event.kind is EventKind.STEP_END
    return event.kind is EventKind.BACKWARD_END and event.index == 1  # synchronised


def spans_of(events: Iterable[Event]) -> list[Span]:
    """In the order of their ends. What has no end (an exception, the end of the record) or no start is left out."""
    started: dict[tuple[EventKind, int], Event] = {}
    spans: list[Span] = []
    for event in events:
        # BACKWARD_END's index says what it was; there is one at a time
        index = 0 if event.kind is EventKind.BACKWARD_END else event.index
        if event.kind in _LANES:
            started[event.kind, index] = event  # after an exception the later one counts
        elif event.kind in _STARTS and (start := started.pop((_STARTS[event.kind], index), None)) is not None:
            start_ns, end_ns = event.ran_ns or (start.time_ns, event.time_ns)
            spans.append(Span(start.kind, index, start_ns, end_ns, start.time_ns, event.ran_ns is not None))
    return spans


def steps_of(events: Iterable[Event], has_optimizer: bool = True) -> list[Step]:
    """The whole steps among the events, see [Note: what a step is]; one that an exception or the record's end cut off
    is left out."""
    events = list(events)
    waits = [span for span in spans_of(events) if span.lane is Lane.WAITING]
    by_kind = [[(span.start_ns, span.end_ns) for span in waits if span.index == index] for index in (0, 1)]
    steps: list[Step] = []
    start_ns: int | None = None
    end_ns: int | None = None  # so far, once the step is complete
    for event in [*events, None]:
        begins = event is None or event.kind in BEGINS_STEP
        if begins and end_ns is not None:
            if start_ns is not None:
                exposed = [_overlap_ns((start_ns, end_ns), intervals) for intervals in by_kind]
                steps.append(Step(start_ns, end_ns, *exposed))
            start_ns = end_ns = None
        if event is None:
            break
        if start_ns is None and begins and (event.kind is EventKind.BACKWARD_START or event.index):
            start_ns = event.time_ns
        if end_ns is not None or completes_step(event, has_optimizer):
            end_ns = event.time_ns
    return steps


def average(steps: Sequence[Step]) -> Average:
    """
    Raises:
        ValueError: for no steps.
    """
    if not steps:
        raise ValueError("no whole step was recorded")
    gradients_ms, parameters_ms = (
        statistics.fmean(ns) / 1e6
        for ns in zip(*((step.exposed_gradients_ns, step.exposed_parameters_ns) for step in steps), strict=True)
    )
    return Average(len(steps), statistics.fmean(step.step_ms for step in steps), gradients_ms, parameters_ms)


def bucket_times(model: ModelEvents) -> list[BucketTimes]:
    """Reductions first, by bucket."""
    spans = spans_of(model.events)
    waits = [(span.start_ns, span.end_ns) for span in spans if span.lane is Lane.WAITING]
    times = []
    for kind, nbytes in ((EventKind.REDUCE_START, model.reduced_bytes), (EventKind.GATHER_START, model.gathered_bytes)):
        for bucket in sorted({span.index for span in spans if span.kind is kind}):
            own = [span for span in spans if span.kind is kind and span.index == bucket]
            ran_ns = [span.end_ns - span.start_ns for span in own]
            exposed_ns = sum(_overlap_ns((span.start_ns, span.end_ns), waits) for span in own)
            times.append(
                BucketTimes(
                    _COLLECTIVES[kind],
                    bucket,
                    len(own),
                    nbytes[bucket] if bucket < len(nbytes) else 0,
                    statistics.median(ran_ns) / 1e6 if all(span.has_run_times for span in own) else None,
                    statistics.median(span.end_ns - span.launched_ns for span in own) / 1e6,
                    1.0 - exposed_ns / sum(ran_ns) if sum(ran_ns) else 1.0,
                )
            )
    return times


def _overlap_ns(interval: _Interval, others: Iterable[_Interval]) -> int:
    """How much of it lies in any of the others, which do not overlap each other."""
    start, end = interval
    return sum(max(0, min(end, other_end) - max(start, other_start)) for other_start, other_end in others)


# --- Chrome trace ----------------------------------------------------------------------------------------------------


def chrome_trace(ranks: Iterable[RankEvents]) -> dict[str, Any]:
    """For chrome://tracing and https://ui.perfetto.dev: a process a rank, and in it threads for steps and each lane.

    Collectives whose spans overlap, as they do where nobody knows when they ran, get threads of their own. Times are
    microseconds from the first event of any rank.
    """
    ranks = list(ranks)
    origin = min(
        (
            span.launched_ns + rank.clock_offset_ns
            for rank in ranks
            for model in rank.models
            for span in spans_of(model.events)
        ),
        default=0,
    )
    content: list[dict[str, Any]] = []
    for rank in ranks:
        content.append(_metadata("process_name", rank.rank, 0, f"rank {rank.rank}"))
        tid = 0
        for number, model in enumerate(rank.models):
            title = f"model {number}: " if len(rank.models) > 1 else ""
            for name, slices in _threads(model):
                content.append(_metadata("thread_name", rank.rank, tid, title + name))
                content.append(_metadata("thread_sort_index", rank.rank, tid, tid))
                for what, start_ns, end_ns, details in slices:
                    content.append(
                        {
                            "name": what,
                            "cat": name,
                            "ph": "X",
                            "ts": (start_ns + rank.clock_offset_ns - origin) / 1e3,
                            "dur": (end_ns - start_ns) / 1e3,
                            "pid": rank.rank,
                            "tid": tid,
                            "args": details,
                        }
                    )
                tid += 1
    return {"displayTimeUnit": "ms", "traceEvents": content}


_Slice = tuple[str, int, int, dict[str, Any]]


def _threads(model: ModelEvents) -> Iterable[tuple[str, list[_Slice]]]:
    steps = [
        (
            f"training step {model.num_skipped_steps + number}",
            step.start_ns,
            step.end_ns,
            {"exposed_ms": step.exposed_ms, "exposed_share": average([step]).exposed_share},
        )
        for number, step in enumerate(model.steps)
    ]
    yield "steps", steps
    spans = spans_of(model.events)
    for lane in Lane:
        own = [span for span in spans if span.lane is lane]
        if lane is not Lane.COMMUNICATION:
            yield lane.value, [(span.name, span.start_ns, span.end_ns, {}) for span in own]
            continue
        for row in _rows(own) or [[]]:
            yield lane.value, [(span.name, span.start_ns, span.end_ns, _details(span, model)) for span in row]


def _details(span: Span, model: ModelEvents) -> dict[str, Any]:
    sizes = model.reduced_bytes if span.kind is EventKind.REDUCE_START else model.gathered_bytes
    details: dict[str, Any] = {"launch_to_done_ms": (span.end_ns - span.launched_ns) / 1e6}
    if span.index < len(sizes):
        details["bytes"] = sizes[span.index]
    return details


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """As few as it takes for no two in a row to overlap."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        free = next((row for row in rows if row[-1].end_ns <= span.start_ns), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _metadata(name: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if name.endswith("sort_index") else "name"
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}}


# --- picture ---------------------------------------------------------------------------------------------------------

_COLORS = {
    EventKind.FORWARD_START: "#7fb3d5",
    EventKind.BACKWARD_START: "#2e6da4",
    EventKind.STEP_START: "#7d5ba6",
    EventKind.REDUCE_START: "#e08e2b",
    EventKind.GATHER_START: "#58a55c",
    EventKind.WAIT_START: "#c62828",
}
_LEGEND = ("forward", "backward", "optimizer step", "reduce a bucket", "gather a bucket", "waiting: exposed")
_MAX_RANKS_DRAWN = 4


def plot(ranks: Sequence[RankEvents], path: Path, *, num_steps: int = 2) -> None:
    """Draws the last steps: for each of the first ranks what it computes, red where it waits, over what is on the wire.

    Of several wrapped models the one with the most steps is drawn.

    Raises:
        ValueError: if no whole step was recorded.
        ModuleNotFoundError: without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: nothing of the caller's is touched
    from matplotlib.patches import Patch

    drawn = [rank for rank in ranks if rank.models][:_MAX_RANKS_DRAWN]
    models = [max(rank.models, key=lambda model: len(model.steps)) for rank in drawn]
    if not models or not (steps := models[0].steps):
        raise ValueError("no whole step was recorded")
    shown = steps[-num_steps:]
    start_ns, end_ns = (ns + drawn[0].clock_offset_ns for ns in (shown[0].start_ns, shown[-1].end_ns))
    figure = Figure(figsize=(14, 1.6 + 1.1 * len(drawn)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for rank, model, axis in zip(drawn, models, axes, strict=True):
        offset_ns = rank.clock_offset_ns - start_ns
        _draw(axis, spans_of(model.events), offset_ns, end_ns - start_ns)
        axis.set_title(_title(rank.rank, model.steps), loc="left", fontsize=9)
    axes[-1].set_xlabel("ms")
    patches = [Patch(color=color, label=label) for color, label in zip(_COLORS.values(), _LEGEND, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _title(rank: int, steps: Sequence[Step]) -> str:
    if not steps:
        return f"rank {rank}"
    times = average(steps)
    return (
        f"rank {rank}: {times.step_ms:.1f} ms a step, {times.exposed_ms:.1f} ms exposed communication "
        f"({times.exposed_share:.1%}), over {times.num_steps} steps"
    )


def _draw(axis: Axes, spans: Iterable[Span], offset_ns: int, length_ns: int) -> None:
    """Waiting comes over the backward that it is in, and over nothing else."""
    for span in sorted(spans, key=lambda span: (span.lane is Lane.WAITING, span.start_ns, -span.end_ns)):
        start_ns, end_ns = span.start_ns + offset_ns, span.end_ns + offset_ns
        if end_ns < 0 or start_ns > length_ns:
            continue
        height = 0 if span.lane is Lane.COMMUNICATION else 1
        axis.broken_barh(
            [(start_ns / 1e6, (end_ns - start_ns) / 1e6)],
            (height, 0.9),
            facecolors=_COLORS[span.kind],
            edgecolors="none" if span.lane is Lane.WAITING else "white",  # it may be short
            linewidth=0.4,
        )
    axis.set_xlim(0, length_ns / 1e6)
    axis.set_yticks([0.45, 1.45], ["wire", "rank"])
    axis.spines[["top", "right", "left"]].set_visible(False)
