"""Finds the bottleneck of a training from the ranks' measurements: one sentence on its waits. Pure functions.

Only training steps count: an evaluation does not.

[Note: clocks of ranks]
Launches are compared over ranks, whose clocks differ: by nothing between processes of a machine, by milliseconds
between machines. A collective ends on all ranks at about the same moment. If the backend reports that time (gloo), the
medians of these ends align the clocks. Elsewhere clocks are used as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from ..core import EventKind
from .timeline import ModelEvents, RankEvents, evaluations_of, overlap_ns, spans_of

Kind = Literal["unsteady", "straggler", "input-bound", "link-bound", "compute-bound"]

NOTABLE_SHARE = 0.1
"""The smallest part of the time from which a training counts as bound by input or communication."""
LATE_SHARE = 0.05
"""The part of a step by which a straggler is late, at least."""
LAST_SHARE = 2 / 3
"""The part of buckets in which a straggler is the last, at least; in as many every second of two equal ranks is."""
FEWEST_LAUNCHES = 6
"""Fewer than these tell nothing of who is late."""
UNSTEADY_SHARE = 0.5
"""The part of the median step by which the middle half of the steps may differ; beyond it, a second run would name
another cause."""
FEWEST_STEPS = 4
"""Fewer than these have no middle half."""


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """The measurements of one rank, in milliseconds a step, for tables, pictures and verdicts.

    Attributes:
        rank: its number.
        periods_ms: of each step from its start to the start of the next, evaluations left out. A single recorded step
            counts to its own end.
        input_ms: of the mean, waiting for the next batch.
        gradients_ms: of it, waiting for gradients.
        parameters_ms: of it, waiting for new weights.
        launches: when it launched the reduction of a bucket, and when that ended (None if the backend does not report
            it), in nanoseconds of its own clock; by number, which is the same on all ranks.
    """

    rank: int
    periods_ms: Sequence[float]
    input_ms: float
    gradients_ms: float
    parameters_ms: float
    launches: Mapping[int, tuple[int, int | None]] = dataclasses.field(default_factory=dict)

    @property
    def period_ms(self) -> float:
        return statistics.fmean(self.periods_ms)

    @property
    def exposed_ms(self) -> float:
        return self.gradients_ms + self.parameters_ms

    @property
    def exposed_share(self) -> float:
        """The part of a step, from 0 to 1, that waits for communication."""
        return self.exposed_ms / self.period_ms if self.period_ms > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Lateness:
    """Counts how often a rank was the last to launch a bucket, and by how much in the median.

    ``num_launches`` are the buckets that all ranks launched.
    """

    rank: int
    num_last: int
    num_launches: int
    late_ms: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The bound of a training.

    Attributes:
        kind: in one word.
        sentence: for people, with the numbers that it was found by.
        lateness: of the rank that is last most often; None on one rank, and where too few launches are known.
    """

    kind: Kind
    sentence: str
    lateness: Lateness | None = None


def verdict_of(ranks: Sequence[RankTimes]) -> Verdict:
    """Finds the bound from the numbers of one rank or more."""
    period_ms = statistics.fmean(rank.period_ms for rank in ranks)
    slowest_input = max(ranks, key=lambda rank: rank.input_ms)
    exposed_ms = statistics.fmean(rank.exposed_ms for rank in ranks)
    late = lateness(ranks)
    unsteady = _unsteady(ranks)
    if unsteady is not None:
        return Verdict("unsteady", unsteady, late)
    # Before the link, as the others' waiting for a straggler looks like a slow link.
    if late is not None and _is_straggler(late, period_ms):
        return Verdict("straggler", _straggler(late, ranks), late)
    if slowest_input.input_ms >= NOTABLE_SHARE * period_ms and slowest_input.input_ms >= exposed_ms:
        share = slowest_input.input_ms / period_ms
        sentence = (
            f"input-bound: {share:.0%} of the time of rank {slowest_input.rank} waits for the next batch "
            f"({slowest_input.input_ms:.1f} of {period_ms:.1f} ms a step); more workers of the DataLoader or lighter "
            "transforms shorten it, no option here does"
        )
        return Verdict("input-bound", sentence, late)
    gradients_ms = statistics.fmean(rank.gradients_ms for rank in ranks)
    if exposed_ms >= NOTABLE_SHARE * period_ms:
        what = "gradients"
        remedy = 'more microbatches a step, or grad_wire_dtype="bf16"'
        if exposed_ms - gradients_ms > gradients_ms:
            what = "new weights"
            remedy = "overlap_param_gather=True"
        sentence = (
            f"link-bound: {exposed_ms / period_ms:.0%} of the time waits for communication ({exposed_ms:.1f} of "
            f"{period_ms:.1f} ms a step), most of it for {what}; what may help is {remedy}"
        )
        return Verdict("link-bound", sentence, late)
    waits = f", {exposed_ms:.1f} wait for communication and {slowest_input.input_ms:.1f} for input"
    own_ms = max(0.0, period_ms - exposed_ms - slowest_input.input_ms)
    sentence = f"compute-bound: of {period_ms:.1f} ms a step {own_ms:.1f} are the rank's own work{waits}"
    return Verdict("compute-bound", sentence, late)


def _unsteady(ranks: Sequence[RankTimes]) -> str | None:
    """Says by how much steps differ, if it is too much for a verdict."""
    widest = max(ranks, key=lambda rank: _middle_half(rank)[1] - _middle_half(rank)[0])
    low, high = _middle_half(widest)
    if high - low <= UNSTEADY_SHARE * statistics.median(widest.periods_ms):
        return None
    return (
        f"unsteady: the middle half of the steps of rank {widest.rank} took {low:.1f} to {high:.1f} ms, and a second "
        f"run may be bound by something else; in the mean {widest.exposed_ms:.1f} of {widest.period_ms:.1f} ms wait "
        f"for communication and {widest.input_ms:.1f} for input. Record more (--steps), or leave the machine alone"
    )


def _middle_half(rank: RankTimes) -> tuple[float, float]:
    """Returns the quartiles of a rank's steps, in milliseconds; twice 0 of fewer than :data:`FEWEST_STEPS`."""
    if len(rank.periods_ms) < FEWEST_STEPS:
        return 0.0, 0.0
    low, _, high = statistics.quantiles(rank.periods_ms, n=4, method="inclusive")
    return low, high


def lateness(ranks: Sequence[RankTimes]) -> Lateness | None:
    """Finds the rank that was most often the last to launch a bucket; see [Note: clocks of ranks].

    None on one rank, and with fewer than :data:`FEWEST_LAUNCHES` that all ranks know of.
    """
    if len(ranks) < 2:
        return None
    common = sorted(set.intersection(*(set(rank.launches) for rank in ranks)))
    if len(common) < FEWEST_LAUNCHES:
        return None
    ahead = [_ahead_ns(rank, ranks[0], common) for rank in ranks]
    late_ms: dict[int, list[float]] = {rank.rank: [] for rank in ranks}
    for number in common:
        launched = [(rank.launches[number][0] - ns, rank.rank) for rank, ns in zip(ranks, ahead, strict=True)]
        (before, _), (last, who) = sorted(launched)[-2:]
        late_ms[who].append((last - before) / 1e6)
    rank, most = max(late_ms.items(), key=lambda item: len(item[1]))
    return Lateness(rank, len(most), len(common), statistics.median(most))


def _ahead_ns(rank: RankTimes, reference: RankTimes, common: Sequence[int]) -> float:
    """The nanoseconds by which a rank's clock is ahead of another's."""
    ends = ((rank.launches[number][1], reference.launches[number][1]) for number in common)
    differences = [
        end_ns - reference_ns for end_ns, reference_ns in ends if end_ns is not None and reference_ns is not None
    ]
    return statistics.median(differences) if differences else 0.0


def _is_straggler(late: Lateness, period_ms: float) -> bool:
    return late.num_last >= LAST_SHARE * late.num_launches and late.late_ms >= LATE_SHARE * period_ms


def _straggler(late: Lateness, ranks: Sequence[RankTimes]) -> str:
    late_rank = next(rank for rank in ranks if rank.rank == late.rank)
    others_ms = statistics.median(rank.input_ms for rank in ranks if rank.rank != late.rank)
    sentence = (
        f"straggler: rank {late.rank} was last in {late.num_last} of {late.num_launches} buckets, by "
        f"{late.late_ms:.1f} ms of a step of {statistics.fmean(rank.period_ms for rank in ranks):.1f}"
    )
    if late_rank.input_ms - others_ms > late.late_ms / 2:
        waits = f"it waits for the next batch for {late_rank.input_ms:.1f} ms a step"
        return f"{sentence}; {waits}, the others for {others_ms:.1f}"
    return f"{sentence}; the others wait for it: look at its device, its share of the machine, and its batches"


# --- of a record ------------------------------------------------------------------------------------------------------


def rank_times(rank: RankEvents, model: ModelEvents) -> RankTimes:
    """Returns a verdict's input for one model on one rank, which has made a whole step."""
    steps = model.steps
    periods_ms = [step.alone_ms for step in steps]
    input_ms = 0.0
    # A single step does not show the time between two.
    if len(steps) > 1:
        evaluations = evaluations_of(spans_of(model.events))
        within = [(step.start_ns, following.start_ns) for step, following in itertools.pairwise(steps)]
        periods_ms = [(end - start - overlap_ns((start, end), evaluations)) / 1e6 for start, end in within]
        loaded_ns = overlap_ns((steps[0].start_ns, steps[-1].start_ns), rank.loads)
        loaded_ns -= sum(overlap_ns(evaluation, rank.loads) for evaluation in evaluations)
        input_ms = loaded_ns / 1e6 / len(periods_ms)
    counted = steps[: len(periods_ms)]
    gradients_ms = statistics.fmean(step.exposed_gradients_ns for step in counted) / 1e6
    parameters_ms = statistics.fmean(step.exposed_parameters_ns for step in counted) / 1e6
    spans = sorted(spans_of(model.events), key=lambda span: span.launched_ns)
    reduced = [span for span in spans if span.kind is EventKind.REDUCE_START]
    offset_ns = rank.clock_offset_ns
    launches = {
        number: (span.launched_ns + offset_ns, span.end_ns + offset_ns if span.has_run_times else None)
        for number, span in enumerate(reduced)
    }
    return RankTimes(rank.rank, periods_ms, input_ms, gradients_ms, parameters_ms, launches)


def models_of(ranks: Sequence[RankEvents]) -> list[list[tuple[RankEvents, ModelEvents]]]:
    """By model, the ranks on which it has made a whole step, with their events; models without any are left out.

    Ranks wrap their models in one order, so the number says which belong together.
    """
    models = []
    for number in range(max((len(rank.models) for rank in ranks), default=0)):
        on_ranks = [(rank, rank.models[number]) for rank in ranks if number < len(rank.models)]
        with_steps = [(rank, model) for rank, model in on_ranks if model.steps]
        if with_steps:
            models.append(with_steps)
    return models


def verdicts(ranks: Sequence[RankEvents]) -> list[Verdict]:
    """Judges each model that has made a whole step."""
    return [verdict_of([rank_times(rank, model) for rank, model in on_ranks]) for on_ranks in models_of(ranks)]
