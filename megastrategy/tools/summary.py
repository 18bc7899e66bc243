"""Sums up a profile: one sentence on the script's waits, and the numbers that two profiles are compared by.

Only training steps count: an evaluation does not.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..core import EventKind
from .bottlenecks import RankTimes, Verdict, verdict_of
from .gaps import EVALUATION, LOADING, gaps_of
from .timeline import ModelEvents, RankEvents, average, bucket_times, evaluations_of, overlap_ns, spans_of

FILE = "summary.json"


class SummaryError(Exception):
    """Says why a file cannot be compared."""


def rank_times(rank: RankEvents, model: ModelEvents) -> RankTimes:
    """Returns a verdict's input for one model on one rank, which has made a whole step."""
    steps = model.steps
    mean = average(steps)
    within = (steps[0].start_ns, steps[-1].start_ns)
    period_ms = mean.step_ms
    input_ms = 0.0
    # A single step does not show the time between two.
    if len(steps) > 1:
        evaluated_ns = overlap_ns(within, evaluations_of(spans_of(model.events)))
        loads = [(gap.start_ns, gap.end_ns) for gap in gaps_of(model, rank.loads) if gap.name == LOADING]
        period_ms = (within[1] - within[0] - evaluated_ns) / 1e6 / (len(steps) - 1)
        input_ms = overlap_ns(within, loads) / 1e6 / (len(steps) - 1)
    spans = sorted(spans_of(model.events), key=lambda span: span.launched_ns)
    reduced = [span for span in spans if span.kind is EventKind.REDUCE_START]
    offset_ns = rank.clock_offset_ns
    launches = {
        number: (span.launched_ns + offset_ns, span.end_ns + offset_ns if span.has_run_times else None)
        for number, span in enumerate(reduced)
    }
    return RankTimes(rank.rank, period_ms, input_ms, mean.exposed_gradients_ms, mean.exposed_parameters_ms, launches)


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
    return [verdict_of([rank_times(rank, model) for rank, model in own]) for own in models_of(ranks)]


def summary(ranks: Sequence[RankEvents], target: str) -> dict[str, Any]:
    """Returns plain types: by model the verdict, and its numbers on each rank, in milliseconds a step."""
    models = []
    for own, verdict in zip(models_of(ranks), verdicts(ranks), strict=True):
        late = verdict.lateness
        models.append(
            {
                "verdict": verdict.kind,
                "sentence": verdict.sentence,
                "last_rank": None if late is None else late.rank,
                "last_in_buckets": None if late is None else late.num_last,
                "buckets_compared": None if late is None else late.num_launches,
                "late_ms": None if late is None else late.late_ms,
                "ranks": [_of_rank(rank, model) for rank, model in own],
            }
        )
    return {"megastrategy": __version__, "script": target, "models": models}


def _of_rank(rank: RankEvents, model: ModelEvents) -> dict[str, Any]:
    steps = model.steps
    times = rank_times(rank, model)
    mean = average(model.steps)
    lengths = [step.step_ms for step in steps]
    quarters = statistics.quantiles(lengths, n=4) if len(lengths) > 1 else lengths * 3
    gaps: dict[str, float] = {}
    for gap in gaps_of(model, rank.loads):
        if gap.name != EVALUATION:
            inside_ns = overlap_ns((gap.start_ns, gap.end_ns), [(steps[0].start_ns, steps[-1].end_ns)])
            gaps[gap.name] = gaps.get(gap.name, 0.0) + inside_ns / 1e6 / len(steps)
    return {
        "rank": rank.rank,
        "num_steps": len(steps),
        "step_ms": mean.step_ms,
        "step_ms_quartiles": quarters,
        "period_ms": times.period_ms,
        "input_ms": times.input_ms,
        "exposed_gradients_ms": mean.exposed_gradients_ms,
        "exposed_parameters_ms": mean.exposed_parameters_ms,
        "exposed_share": mean.exposed_share,
        "gaps_ms": {name: ms for name, ms in gaps.items() if ms > 0},
        "buckets": [
            {
                "what": bucket.what,
                "bucket": bucket.bucket,
                "bytes": bucket.nbytes,
                "wire_ms": bucket.ran_ms,
                "launch_to_done_ms": bucket.launch_to_done_ms,
                "hidden_share": bucket.hidden_share,
            }
            for bucket in bucket_times(model)
        ],
    }


# --- comparing -------------------------------------------------------------------------------------------------------


def read_summary(path: Path) -> dict[str, Any]:
    """Reads the file of an earlier profile. Raises SummaryError for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_one = content["models"][0]["ranks"][0]["step_ms"] > 0
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        is_one = False
    if not is_one:
        raise SummaryError(f"{path} is no {FILE} of megastrategy profile: pass one that is in a profile's folder")
    return dict(content)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Lists the parts of the first model's step, before and after: means over ranks, in milliseconds a step.

    ``"step"`` is the slowest rank's.
    """
    rows = []
    for content in (before, after):
        ranks = content["models"][0]["ranks"]

        def mean(name: str, ranks: Any = ranks) -> float:
            return statistics.fmean(rank[name] for rank in ranks)

        names = list(dict.fromkeys(name for rank in ranks for name in rank["gaps_ms"]))
        gaps = {name: statistics.fmean(rank["gaps_ms"].get(name, 0.0) for rank in ranks) for name in names}
        rows.append(
            {
                "step": max(rank["step_ms"] for rank in ranks),
                "from step to step": mean("period_ms"),
                "waits for gradients": mean("exposed_gradients_ms"),
                "waits for weights": mean("exposed_parameters_ms"),
                **gaps,
            }
        )
    return [(name, rows[0].get(name, 0.0), rows[1].get(name, 0.0)) for name in {**rows[0], **rows[1]}]
