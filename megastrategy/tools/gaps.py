"""Names the gaps between the engine's spans, in which it has no events of a rank's work.

A gap is named by the spans before and after it. The recorder reports batches of a ``DataLoader``, and these are cut out
of the gap. Forwards without gradients outside of a training step's forward, and the time between them, are one gap, an
evaluation: nothing in it is training.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from ..core import EventKind
from .timeline import Lane, ModelEvents, Span, evaluations_of, spans_of

EVALUATION = "evaluation"
LOADING = "data loading"
LOSS = "loss"
BEFORE_STEP = "clipping, hooks"
MICROBATCHES = "between microbatches: hooks"
STEP = "optimizer"
BETWEEN = "between steps: hooks, logging"
PLAIN = "plain optimizer, hooks, logging"

_FORWARD = EventKind.FORWARD_START
_BACKWARD = EventKind.BACKWARD_START
_STEP = EventKind.STEP_START
_WAIT = EventKind.WAIT_START


@dataclasses.dataclass(frozen=True)
class Gap:
    """A time in which the rank neither computed for training nor waited for communication, as far as is known."""

    name: str
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class GapTimes:
    """All gaps of a name: how many, the median of their lengths, and all together."""

    name: str
    count: int
    median_ms: float
    total_ms: float


def gaps_of(model: ModelEvents, loads: Iterable[tuple[int, int]] = ()) -> list[Gap]:
    """Lists the gaps in order of time, apart from each other.

    Args:
        model: whose spans leave gaps.
        loads: when the rank waited for batches.
    """
    gaps: list[Gap] = []
    for gap in _between_spans(model):
        gaps += [gap] if gap.name == EVALUATION else _cut(gap, loads)
    return gaps


def gap_times(gaps: Sequence[Gap]) -> list[GapTimes]:
    """Sums gaps up by name, the longest in all first."""
    times = []
    for name in dict.fromkeys(gap.name for gap in gaps):
        lengths_ms = [(gap.end_ns - gap.start_ns) / 1e6 for gap in gaps if gap.name == name]
        times.append(GapTimes(name, len(lengths_ms), statistics.median(lengths_ms), sum(lengths_ms)))
    return sorted(times, key=lambda item: -item.total_ms)


def _between_spans(model: ModelEvents) -> list[Gap]:
    spans = [span for span in spans_of(model.events) if span.lane is not Lane.COMMUNICATION]
    # collectives run beside everything else, and forwards without gradients are no training
    busy: list[tuple[int, int, Span | None]] = [
        (span.start_ns, span.end_ns, span) for span in spans if span.kind is not _FORWARD or span.index
    ]
    busy += [(start_ns, end_ns, None) for start_ns, end_ns in evaluations_of(spans)]
    gaps: list[Gap] = []
    before: Span | None = None
    until_ns: int | None = None
    for start_ns, end_ns, span in sorted(busy, key=lambda item: (item[0], -item[1])):
        if until_ns is not None and end_ns <= until_ns:
            continue  # inside the one before: a wait, or all of a step in manual optimization
        if until_ns is not None and start_ns > until_ns:
            gaps.append(Gap(_name(before, span, model.has_optimizer), until_ns, start_ns))
        if span is None:
            gaps.append(Gap(EVALUATION, start_ns, end_ns))
        before = span
        until_ns = end_ns
    return gaps


def _name(before: Span | None, after: Span | None, has_optimizer: bool) -> str:
    """Names the gap between two spans. None means an evaluation: the gap beside one is between steps."""
    if before is None or after is None:
        return BETWEEN
    if before.kind is _FORWARD and after.kind is _BACKWARD:
        return LOSS
    if before.kind is _STEP and after.kind is _WAIT:
        return STEP  # weights are cast, and their gathers launched
    # a wait of index 0 is for gradients: a step that clips in a hook waits for them before it begins
    if before.kind in (_BACKWARD, _WAIT) and (after.kind is _STEP or (after.kind is _WAIT and not after.index)):
        return BEFORE_STEP
    # a plain optimizer has no events, so its step is in this gap, too
    if before.kind is _BACKWARD:
        return MICROBATCHES if has_optimizer else PLAIN
    return BETWEEN if has_optimizer else PLAIN


def _cut(gap: Gap, loads: Iterable[tuple[int, int]]) -> list[Gap]:
    pieces: list[Gap] = []
    start_ns = gap.start_ns
    # a load may begin before the gap or end after it: its part inside is cut out
    for load_start, load_end in loads:
        begin = max(load_start, start_ns)
        end = min(load_end, gap.end_ns)
        if begin >= end:
            continue
        if begin > start_ns:
            pieces.append(Gap(gap.name, start_ns, begin))
        pieces.append(Gap(LOADING, begin, end))
        start_ns = end
    if start_ns < gap.end_ns:
        pieces.append(Gap(gap.name, start_ns, gap.end_ns))
    return pieces
