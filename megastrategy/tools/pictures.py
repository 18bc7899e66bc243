"""The picture of a timeline: a PNG of the last steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import EventKind
from .bottlenecks import rank_times
from .timeline import Lane, ModelEvents, RankEvents, Span, Step, evaluations_of, spans_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    EventKind.FORWARD_START: "#7fb3d5",
    EventKind.BACKWARD_START: "#2e6da4",
    EventKind.STEP_START: "#7d5ba6",
    EventKind.REDUCE_START: "#e08e2b",
    EventKind.GATHER_START: "#58a55c",
    EventKind.WAIT_START: "#c62828",
}
_LOADING = "#f2d13c"
_EVALUATION = "#9fd8cb"
_LEGEND = ("forward", "backward", "optimizer step", "reduce a bucket", "gather a bucket", "waiting: exposed")
_MAX_RANKS_DRAWN = 4


def plot(ranks: Sequence[RankEvents], path: Path, *, num_steps: int = 2) -> None:
    """Draws the last steps: for each of the first ranks what it computes, red where it waits, over what is on the wire.

    Of several wrapped models the one with the most steps is drawn. Steps with an evaluation in or between them are
    drawn only if there are no others: it would fill the picture. Data loading and evaluations are pale.

    Raises:
        ValueError: if no whole step was recorded.
        ModuleNotFoundError: without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: nothing of the caller's is touched
    from matplotlib.patches import Patch

    drawn = [rank for rank in ranks if rank.models][:_MAX_RANKS_DRAWN]
    models = [max(rank.models, key=lambda model: len(model.steps)) for rank in drawn]
    steps = models[0].steps if models else []
    if not steps:
        raise ValueError("no whole step was recorded")
    shown = _last_in_a_row(steps, models[0], num_steps)
    start_ns, end_ns = (ns + drawn[0].clock_offset_ns for ns in (shown[0].start_ns, shown[-1].end_ns))
    figure = Figure(figsize=(5, 2.0 + 1.2 * len(drawn)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("A bucket on the wire is hidden\nwhere the rank above is not red", fontsize=10)
    axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for rank, model, axis in zip(drawn, models, axes, strict=True):
        offset_ns = rank.clock_offset_ns - start_ns
        evaluations = evaluations_of(spans_of(model.events))
        _draw_pale(axis, rank.loads, _LOADING, offset_ns, end_ns - start_ns)
        _draw_pale(axis, evaluations, _EVALUATION, offset_ns, end_ns - start_ns)
        _draw(axis, spans_of(model.events), offset_ns, end_ns - start_ns)
        axis.set_title(_title(rank, model), loc="left", fontsize=9)
    axes[-1].set_xlabel("time, ms")
    patches = [Patch(color=color, label=label) for color, label in zip(_COLORS.values(), _LEGEND, strict=True)]
    patches.append(Patch(color=_LOADING, label="data loading"))
    patches.append(Patch(color=_EVALUATION, label="evaluation"))
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)


def _last_in_a_row(steps: Sequence[Step], model: ModelEvents, num_steps: int) -> Sequence[Step]:
    """Returns as many steps as can be had without an evaluation, up to ``num_steps``; the last such."""
    evaluations = evaluations_of(spans_of(model.events))
    for length in range(min(num_steps, len(steps)), 0, -1):
        for first in range(len(steps) - length, -1, -1):
            start_ns = steps[first].start_ns
            end_ns = steps[first + length - 1].end_ns
            if not any(start_ns < end and begin < end_ns for begin, end in evaluations):
                return steps[first : first + length]
    return steps[-1:]


def _draw_pale(axis: Axes, intervals: Iterable[tuple[int, int]], color: str, offset_ns: int, length_ns: int) -> None:
    for begin_ns, finish_ns in intervals:
        start_ns = max(0, begin_ns + offset_ns)
        end_ns = min(length_ns, finish_ns + offset_ns)
        if end_ns > start_ns:
            axis.broken_barh([(start_ns / 1e6, (end_ns - start_ns) / 1e6)], (1, 0.9), facecolors=color)


def _title(rank: RankEvents, model: ModelEvents) -> str:
    if not model.steps:
        return f"rank {rank.rank}"
    times = rank_times(rank, model)
    return (
        f"rank {rank.rank}: {times.exposed_ms:.1f} of {times.period_ms:.1f} ms wait "
        f"({times.exposed_share:.1%}), mean of {len(model.steps)} steps"
    )


def _draw(axis: Axes, spans: Iterable[Span], offset_ns: int, length_ns: int) -> None:
    """Draws spans. Waiting comes over the backward that it is in, and over nothing else. A forward without gradients is
    a gap."""
    trained = [span for span in spans if span.kind is not EventKind.FORWARD_START or span.index]
    for span in sorted(trained, key=lambda span: (span.lane is Lane.WAITING, span.start_ns, -span.end_ns)):
        start_ns = span.start_ns + offset_ns
        end_ns = span.end_ns + offset_ns
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
