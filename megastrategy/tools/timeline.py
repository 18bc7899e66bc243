"""Computes the use of time from the engine's events: spans, steps, exposed communication.

Pure functions over the events of one rank (``core.events``). Times are the host's, in nanoseconds of the rank's own
clock; a rank's ``clock_offset_ns`` takes them to a clock that all ranks share.

[Note: what a step is]
A step begins with the first forward that trains, or with a backward if no forward is seen. It ends with the last event
before the next forward or backward after the optimizer's step. So the wait for new weights is in it, and work
between steps (data loading, validation, logging) is not. Microbatches that are accumulated belong to the step that uses
them. A plain optimizer, which may step after an all-reduce, has no events: the synchronised backward counts as its
step. The reported time of a step is that until the next begins, evaluations left out (``bottlenecks.rank_times``).
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Iterable, Sequence

from ..core import Event, EventKind

_Interval = tuple[int, int]


class Lane(enum.Enum):
    """Names the row in which a span is drawn."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    WAITING = "waiting"


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        kind: the event that it starts with.
        index: that event's.
        start_ns, end_ns: of a collective, when it ran if the backend reports that, otherwise from its launch to the end
            of the wait for it.
        launched_ns: when the engine asked for it; of all but collectives ``start_ns``.
        has_run_times: whether it is a collective whose run times the backend reported.
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
            return f"{COLLECTIVES[self.kind]} bucket {self.index}"
        return str(self.kind.value).removesuffix("_start")


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step, see [Note: what a step is]; waiting in it is its exposed communication.

    An evaluation between its microbatches is no part of its time.
    """

    start_ns: int
    end_ns: int
    exposed_gradients_ns: int
    exposed_parameters_ns: int
    evaluation_ns: int = 0

    @property
    def alone_ms(self) -> float:
        """Its time without the work between steps; what a step takes of a run is the time until the next begins."""
        return (self.end_ns - self.start_ns - self.evaluation_ns) / 1e6


@dataclasses.dataclass(frozen=True)
class BucketTimes:
    """Times of one bucket's reductions, or of its gathers: medians over their number.

    Attributes:
        what: "reduce" or "gather".
        nbytes: of the bucket, in the dtype that is sent; 0 if it is not known.
        ran_ms: how long it took, waiting for slower ranks included; None if the backend does not report it (CUDA).
        launch_to_done_ms: with the time in the queue behind other collectives.
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
    """Holds the events of one wrapper, as its listener heard them.

    Attributes:
        reduced_bytes, gathered_bytes: by bucket.
        num_skipped_steps: how many steps it had done before the first of these events.
        has_optimizer: whether a DistributedOptimizer steps it, and has events.
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
    """Holds the events of all wrappers of one rank.

    Attributes:
        clock_offset_ns: is added to its times to compare them with others'.
        loads: when it waited for a ``DataLoader``'s next batch, in order.
    """

    rank: int
    models: Sequence[ModelEvents]
    clock_offset_ns: int = 0
    loads: Sequence[_Interval] = ()


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
COLLECTIVES = {EventKind.REDUCE_START: "reduce", EventKind.GATHER_START: "gather"}
BEGINS_STEP = (EventKind.FORWARD_START, EventKind.BACKWARD_START)
"""A step lasts until the first of these after the event that completes it."""


def completes_step(event: Event, has_optimizer: bool) -> bool:
    """Returns whether the events until the next forward or backward are the rest of a step."""
    if has_optimizer:
        return event.kind is EventKind.STEP_END
    return event.kind is EventKind.BACKWARD_END and event.index == 1  # synchronised


def spans_of(events: Iterable[Event]) -> list[Span]:
    """Lists spans by their ends. One without an end (an exception, the record's end) or a start is left out."""
    started: dict[tuple[EventKind, int], Event] = {}
    spans: list[Span] = []
    for event in events:
        # BACKWARD_END's index has its kind; there is one at a time
        index = 0 if event.kind is EventKind.BACKWARD_END else event.index
        if event.kind in _LANES:
            started[event.kind, index] = event  # after an exception the later one counts
        elif event.kind in _STARTS:
            start = started.pop((_STARTS[event.kind], index), None)
            if start is None:
                continue
            start_ns, end_ns = event.ran_ns or (start.time_ns, event.time_ns)
            spans.append(Span(start.kind, index, start_ns, end_ns, start.time_ns, event.ran_ns is not None))
    return spans


def steps_of(events: Iterable[Event], has_optimizer: bool = True) -> list[Step]:
    """Lists the whole steps among the events, see [Note: what a step is].

    One that an exception or the record's end cut off is left out.
    """
    events = list(events)
    spans = spans_of(events)
    waits = [span for span in spans if span.lane is Lane.WAITING]
    by_kind = [[(span.start_ns, span.end_ns) for span in waits if span.index == index] for index in (0, 1)]
    evaluations = evaluations_of(spans)
    steps: list[Step] = []
    start_ns: int | None = None
    end_ns: int | None = None  # so far, once the step is complete
    for event in [*events, None]:
        # none comes after the last event, and ends the last step as a next forward would
        begins = event is None or event.kind in BEGINS_STEP
        if begins and end_ns is not None:
            # without a start the record began within the step, whose length is unknown
            if start_ns is not None:
                lost = [overlap_ns((start_ns, end_ns), intervals) for intervals in (*by_kind, evaluations)]
                steps.append(Step(start_ns, end_ns, *lost))
            start_ns = end_ns = None
        if event is None:
            break
        # a forward without gradients (index 0) begins no step: it is an evaluation
        if start_ns is None and begins and (event.kind is EventKind.BACKWARD_START or event.index):
            start_ns = event.time_ns
        if end_ns is not None or completes_step(event, has_optimizer):
            end_ns = event.time_ns
    return steps


def evaluations_of(spans: Iterable[Span]) -> list[_Interval]:
    """Lists evaluations: from the first to the last of consecutive forwards without gradients, with the time between
    them.

    One inside of a training forward (a teacher's, in manual optimization) is a part of that.
    """
    evaluations: list[_Interval] = []
    goes_on = False
    trained_until_ns = 0
    computed = [span for span in spans if span.lane is Lane.COMPUTE]
    for span in sorted(computed, key=lambda span: (span.start_ns, -span.end_ns)):
        # inside the span before: a teacher's forward, or a step in manual optimization
        if span.end_ns <= trained_until_ns:
            continue
        is_evaluation = span.kind is EventKind.FORWARD_START and not span.index
        if is_evaluation and goes_on:
            evaluations[-1] = (evaluations[-1][0], span.end_ns)
        elif is_evaluation:
            evaluations.append((span.start_ns, span.end_ns))
        else:
            trained_until_ns = span.end_ns
        goes_on = is_evaluation
    return evaluations


def bucket_times(model: ModelEvents) -> list[BucketTimes]:
    """Lists the times of reductions, by bucket, then those of gathers."""
    spans = spans_of(model.events)
    waits = [(span.start_ns, span.end_ns) for span in spans if span.lane is Lane.WAITING]
    times = []
    for kind, nbytes in ((EventKind.REDUCE_START, model.reduced_bytes), (EventKind.GATHER_START, model.gathered_bytes)):
        for bucket in sorted({span.index for span in spans if span.kind is kind}):
            bucket_spans = [span for span in spans if span.kind is kind and span.index == bucket]
            ran_ns = [span.end_ns - span.start_ns for span in bucket_spans]
            exposed_ns = sum(overlap_ns((span.start_ns, span.end_ns), waits) for span in bucket_spans)
            times.append(
                BucketTimes(
                    COLLECTIVES[kind],
                    bucket,
                    len(bucket_spans),
                    nbytes[bucket] if bucket < len(nbytes) else 0,
                    # if one event lacks its times, the span is from launch to wait, and is no time on the wire
                    statistics.median(ran_ns) / 1e6 if all(span.has_run_times for span in bucket_spans) else None,
                    statistics.median(span.end_ns - span.launched_ns for span in bucket_spans) / 1e6,
                    1.0 - exposed_ns / sum(ran_ns) if sum(ran_ns) else 1.0,
                )
            )
    return times


def overlap_ns(interval: _Interval, others: Iterable[_Interval]) -> int:
    """Sums the overlap of an interval with the others, which do not overlap each other."""
    start, end = interval
    return sum(max(0, min(end, other_end) - max(start, other_start)) for other_start, other_end in others)
