"""Takes a profile apart: what a rank computed, what the link carried, and what sending cost its processor.

[Note: a rank's own time]
Where torch computes on the CPU, work is measured in processor time of the thread that trains: what other ranks, the
link and other programs on the machine do is not in it. On other devices it is the device's time between two events,
with what communication slowed it down by. Waits are in neither.

[Note: the link]
A collective cannot go on before all ranks have begun it, so on the rank that began last it takes what the link needs.
Those times are a hop and a rate: over collectives of several sizes the line through them, found by the median of
slopes (Theil 1950), which single late ones do not move.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core import Event, EventKind
from ..recorded_model import RecordedModel
from ..summary import rank_times
from ..timeline import BEGINS_STEP, ModelEvents, RankEvents, completes_step, spans_of
from .simulator import Link, Processor
from .steps import Network, Schedule, Work, simulate_step


class ProfileError(Exception):
    """Says why nothing can be predicted from a profile, and what to do."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Holds what a profile says of a training.

    Attributes:
        work: of a rank in a step; the mean over ranks and steps.
        recorded: the model, as it ran.
        link: None where nothing was sent, or the backend does not tell when it was.
        processor: of a rank.
        step_ms: from step to step, as it was measured; the median.
    """

    work: Work
    recorded: RecordedModel
    link: Link | None
    processor: Processor
    step_ms: float

    @property
    def simulated_ms(self) -> float | None:
        """The simulation of the step that was measured; None without a link."""
        if self.link is None and self.recorded.dp_size > 1:
            return None
        network = Network(self.link or Link(math.inf))
        return simulate_step(self.work, self.recorded.config, self.recorded.dp_size, network, self.processor).step_ms


def read_profile(folder: Path) -> list[RankEvents]:
    """Reads a folder of ``megastrategy profile``. Raises ProfileError if steps cannot be predicted from it."""
    files = sorted(folder.glob("events.rank*.json"))
    if not files:
        raise ProfileError(
            f"{folder} has no events.rank*.json: make them with megastrategy profile --out {folder} SCRIPT"
        )
    try:
        ranks = [RankEvents.from_json(json.loads(file.read_text(encoding="utf-8"))) for file in files]
    except (ValueError, KeyError, TypeError) as error:
        raise ProfileError(f"{folder} was not written by this version: run megastrategy profile again") from error
    except OSError as error:
        raise ProfileError(f"{error.filename} cannot be read: {error.strerror}") from error
    return sorted(ranks, key=lambda rank: rank.rank)


def measure(ranks: Sequence[RankEvents], share: float = 0.5) -> Measured:
    """Takes the first model of a profile apart.

    Args:
        ranks: all of them.
        share: of each part of a step, which of the steps counts: the median, or 0.25 for the one that a quarter of them
            are faster than.

    Raises:
        ProfileError: if it was not recorded on all ranks.
    """
    models = [rank.models[0] for rank in ranks if rank.models and rank.models[0].steps]
    if len(models) != len(ranks) or any(model.recorded is None for model in models):
        raise ProfileError(
            "no whole step was recorded on every rank: run megastrategy profile again, with more --steps"
        )
    recorded = models[0].recorded
    assert recorded is not None, "looked at above"
    parts = [_Parts.of(rank, model, share) for rank, model in zip(ranks, models, strict=True)]
    works = [part.work for part in parts]
    sent = _sent_bytes(works[0], recorded)
    link = _link(models, sent)
    steps_ms = [statistics.median(part.periods_ms) for part in parts]
    return Measured(_mean(works), recorded, link, _processor(parts, models, sent), statistics.median(steps_ms))


# --- a rank's own time -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A rank's steps in parts.

    ``sending_ms``: processor time a step of other threads than the one that trains, torch's own left out.
    """

    work: Work
    sending_ms: float
    periods_ms: Sequence[float]

    @staticmethod
    def of(rank: RankEvents, model: ModelEvents, share: float) -> _Parts:
        recorded = model.recorded
        assert recorded is not None, "its caller looked"
        steps = list(_steps(model))
        if not steps:
            raise ProfileError("no whole step was recorded: run megastrategy profile again, with more --steps")
        labelled = [_labelled(step, recorded) for step in steps]
        num_microbatches = statistics.mode(
            [sum(e.kind is EventKind.BACKWARD_START for e, _ in step[:-1]) for step in steps]
        )

        def mean(*labels: str) -> float:
            return _quantile([sum(one.own_ms[label] for label in labels) for one in labelled], share)

        times = rank_times(rank, model)
        work = Work(
            tuple(recorded.params),
            _ready(model, recorded),
            max(1, num_microbatches),
            mean("forward") / max(1, num_microbatches),
            mean("loss") / max(1, num_microbatches),
            mean("backward") / max(1, num_microbatches),
            mean("before step"),
            0.0,
            0.0,
            # A batch that other processes load takes none of this one's processor.
            max(mean("other"), times.input_ms),
        )
        per_bucket, per_numel = _step_costs(steps, work, recorded, share)
        work = dataclasses.replace(work, step_ms_per_numel=per_numel, step_ms_per_bucket=per_bucket)
        # In a forward without gathers only torch's threads work beside the one that trains.
        others = [one.process_ms["forward"] / max(one.own_ms["forward"], 1e-9) for one in labelled]
        torchs = max(1.0, statistics.median(others)) if recorded.num_threads > 1 else 1.0
        sending = [sum(one.process_ms.values()) - torchs * sum(one.own_ms.values()) for one in labelled]
        periods = [(step[-1][0].time_ns - step[0][0].time_ns) / 1e6 for step in steps]
        return _Parts(work, max(0.0, _quantile(sending, share)), periods)


_Told = tuple[Event, tuple[int, int]]


def _steps(model: ModelEvents) -> Iterator[list[_Told]]:
    """The events of each whole step with the first of the next, without evaluations'."""
    recorded = model.recorded
    assert recorded is not None, "its caller looked"
    step: list[_Told] = []
    is_complete = has_begun = False
    for event, cpu_ns in zip(model.events, recorded.cpu_ns, strict=True):
        if event.kind in (EventKind.FORWARD_START, EventKind.FORWARD_END) and not event.index:
            # An evaluation: its step's length is not known, and it is left out.
            step, is_complete, has_begun = [], False, False
            continue
        if event.kind in BEGINS_STEP and (is_complete or not has_begun):
            if has_begun:
                yield [*step, (event, cpu_ns)]
            step, is_complete, has_begun = [], False, True
        if has_begun:
            step.append((event, cpu_ns))
            is_complete |= completes_step(event, model.has_optimizer)


@dataclasses.dataclass(frozen=True)
class _Labelled:
    """A step's milliseconds by what was done: of the thread that trains, and of the whole process, waits with it."""

    own_ms: Mapping[str, float]
    process_ms: Mapping[str, float]


_WITHIN = {
    EventKind.FORWARD_START: "forward",
    EventKind.FORWARD_END: "loss",
    EventKind.BACKWARD_START: "backward",
    EventKind.BACKWARD_END: "before step",
    EventKind.STEP_START: "step",
    EventKind.STEP_END: "other",
}
"""A rank's work, by the last of these events."""


def _labelled(step: Sequence[_Told], recorded: RecordedModel) -> _Labelled:
    own, process = defaultdict[str, float](float), defaultdict[str, float](float)
    label, waits = "forward", 0
    for (event, cpu), (after, cpu_after) in itertools.pairwise(step):
        label = _WITHIN.get(event.kind, label)
        # Another microbatch begins: the time between is work between steps as well.
        waits += (event.kind is EventKind.WAIT_START) - (event.kind is EventKind.WAIT_END)
        process[label] += (cpu_after[1] - cpu[1]) / 1e6
        if recorded.device_type == "cpu":
            own[label] += (cpu_after[0] - cpu[0]) / 1e6
        elif waits <= 0:
            own[label] += (after.time_ns - event.time_ns) / 1e6
    return _Labelled(own, process)


def _ready(model: ModelEvents, recorded: RecordedModel) -> dict[int, float]:
    """By parameter the part of a synchronised backward after which its gradient is there; the median over steps."""
    found = defaultdict[int, list[float]](list)
    events = list(zip(model.events, recorded.cpu_ns, strict=True))
    start: tuple[int, int] | None = None
    end: tuple[int, int] | None = None
    for event, cpu_ns in events:
        if event.kind is EventKind.BACKWARD_START:
            start, end = (event.time_ns, cpu_ns[0]), None
        elif event.kind is EventKind.WAIT_START and event.index == 0:
            end = event.time_ns, cpu_ns[0]  # the last of them comes once all gradients are there
        elif event.kind is EventKind.BACKWARD_END and event.index == 1 and start is not None:
            end = end or (event.time_ns, cpu_ns[0])
            place = 1 if recorded.device_type == "cpu" else 0
            length = max(1, end[place] - start[place])
            last: dict[int, float] = {}
            for index, time_ns, own_ns in recorded.ready:
                if start[0] <= time_ns <= end[0]:
                    last[index] = ((time_ns, own_ns)[place] - start[place]) / length
            for index, share in last.items():
                found[index].append(min(1.0, max(0.0, share)))
            start = None
    return {index: statistics.median(shares) for index, shares in found.items()}


def _step_costs(
    steps: Sequence[Sequence[_Told]], work: Work, recorded: RecordedModel, share: float
) -> tuple[float, float]:
    """Milliseconds of the optimizer for a bucket, and for an element that this rank steps."""
    layout = work.layout(recorded.config, recorded.dp_size)
    own_numel = {bucket.index: bucket.shard_numel for bucket in layout.buckets}
    place = 0 if recorded.device_type == "cpu" else None
    points: list[tuple[float, float]] = []
    totals = []
    for step in steps:
        inside = [
            told for told in step if told[0].kind in (EventKind.STEP_START, EventKind.GATHER_START, EventKind.STEP_END)
        ]
        times = [(event, cpu[place] if place is not None else event.time_ns) for event, cpu in inside]
        started = [time for event, time in times if event.kind is EventKind.STEP_START]
        ended = [time for event, time in times if event.kind is EventKind.STEP_END]
        if started and ended:
            totals.append((ended[-1] - started[0]) / 1e6)
        for (_, before), (event, now) in itertools.pairwise(times):
            if event.kind is EventKind.GATHER_START and event.index in own_numel and started and now <= ended[-1]:
                points.append((own_numel[event.index], (now - before) / 1e6))
    if not totals:
        return 0.0, 0.0
    total_ms, numel = _quantile(totals, share), sum(own_numel.values())
    # By one line through all buckets, if they were stepped one by one, so that their sum is the whole step's.
    slope = _median_slope(points)
    if slope is None or not 0 <= slope * numel <= total_ms:
        return 0.0, total_ms / numel
    return (total_ms - slope * numel) / len(layout.buckets), slope


def _quantile(values: Sequence[float], share: float) -> float:
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _mean(works: Sequence[Work]) -> Work:
    """Ranks differ by what the machine did: the mean of each part."""
    names = [
        field.name for field in dataclasses.fields(Work) if field.name not in ("params", "ready", "num_microbatches")
    ]
    values: dict[str, Any] = {name: statistics.fmean(getattr(work, name) for work in works) for name in names}
    ready = {
        index: statistics.fmean(work.ready[index] for work in works if index in work.ready)
        for index in {index for work in works for index in work.ready}
    }
    return dataclasses.replace(works[0], ready=ready, **values)


# --- link and processor ----------------------------------------------------------------------------------------------


def _sent_bytes(work: Work, recorded: RecordedModel) -> dict[tuple[EventKind, int], float]:
    """The bytes that a rank sends for a bucket's reduction and for its gather."""
    layout = work.layout(recorded.config, recorded.dp_size)
    schedule = Schedule(work, layout, recorded.config, Network(Link(1.0)))
    sent: dict[tuple[EventKind, int], float] = {}
    for bucket in layout.buckets:
        pieces = schedule.reduction(bucket)
        sent[EventKind.REDUCE_START, bucket.index] = sum(phase.nbytes for piece in pieces for phase in piece)
        if layout.num_shards > 1:
            sent[EventKind.GATHER_START, bucket.index] = sum(phase.nbytes for phase in schedule.gather(bucket))
    # Ranks without copies of their experts send nothing of them, and a link is not to be fitted to that.
    return {key: nbytes for key, nbytes in sent.items() if nbytes}


def _link(models: Sequence[ModelEvents], sent: Mapping[tuple[EventKind, int], float]) -> Link | None:
    """See [Note: the link]."""
    shortest: dict[tuple[EventKind, int, int], float] = {}
    for model in models:
        counts = defaultdict[tuple[EventKind, int], int](int)
        for span in spans_of(model.events):
            key = span.kind, span.index
            if key in sent and span.has_run_times:
                place = (*key, counts[key])
                counts[key] += 1
                shortest[place] = min(shortest.get(place, math.inf), (span.end_ns - span.start_ns) / 1e6)
    points = [(sent[kind, index], ms) for (kind, index, _), ms in shortest.items()]
    if not points:
        return None
    slope = _median_slope(points)
    hops = max(1, (models[0].recorded.dp_size if models[0].recorded else 2) - 1)
    if slope is None or slope <= 0:
        total = sum(nbytes for nbytes, _ in points)
        return Link(total / max(1e-9, sum(ms for _, ms in points)))
    intercept = statistics.median(ms - slope * nbytes for nbytes, ms in points)
    return Link(1 / slope, max(0.0, intercept) / hops)


def _median_slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Theil's: the median of the slopes between means at different places; None if all are at one."""
    by_place = defaultdict[float, list[float]](list)
    for x, y in points:
        by_place[x].append(y)
    middle = sorted((x, statistics.median(ys)) for x, ys in by_place.items())
    slopes = [((y2 - y1) / (x2 - x1), x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(middle, 2) if x2 > x1]
    if not slopes:
        return None
    # Weighted by distance: between sizes that are nearly equal, noise is all there is.
    slopes.sort()
    half, so_far = sum(weight for _, weight in slopes) / 2, 0.0
    for slope, weight in slopes:
        so_far += weight
        if so_far >= half:
            return slope
    return slopes[-1][0]


def _processor(
    parts: Sequence[_Parts], models: Sequence[ModelEvents], sent: Mapping[tuple[EventKind, int], float]
) -> Processor:
    """The cores of a rank, and what a byte costs; where another device computes, communication takes none of it."""
    recorded = [model.recorded for model in models if model.recorded is not None]
    if recorded[0].device_type != "cpu":
        return Processor()
    hosts = defaultdict[str, list[RecordedModel]](list)
    for each in recorded:
        hosts[each.host].append(each)
    here = hosts[recorded[0].host]
    cores = len({core for each in here for core in each.cores}) / len(here)
    launched = sum(sent.get((event.kind, event.index), 0.0) for event in models[0].events)
    nbytes = launched / max(1, len(models[0].steps))
    sending = statistics.fmean(part.sending_ms for part in parts)
    return Processor(cores, sending / nbytes if nbytes else 0.0)
