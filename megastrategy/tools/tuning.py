"""Trains the first steps of a script with several bucket sizes, each in fresh processes, and compares whole steps.

Sizes take turns, round after round, in an order that reverses, so that a machine that becomes slower affects all alike.
A size is compared with the default in the same round. Nothing is estimated from a model of the link: the time of a step
includes everything that slows it (a core that sends and computes, a shared link).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from .timeline import RankEvents

WORTH_IT = 0.95
"""The part of the default's step time that another size must get below to be worth a line in the user's script."""
SMALLEST_NUMEL = 2**14
"""Below this a collective is latency alone on every link there is."""


class TuningError(Exception):
    """Says why nothing can be compared."""


@dataclasses.dataclass(frozen=True)
class SizeTimes:
    """Holds the runs with one bucket size.

    Attributes:
        bucket_size: in elements; None for the default.
        num_buckets: of the first model.
        step_ms: by round, the median step of the slowest rank.
        ratios: by round, to the default's step.
    """

    bucket_size: int | None
    num_buckets: int
    step_ms: Sequence[float]
    ratios: Sequence[float]

    @property
    def is_worth_it(self) -> bool:
        """Returns whether it is clearly faster than the default: in its median by more than 5 %, and in every round."""
        return statistics.median(self.ratios) < WORTH_IT and max(self.ratios) < 1.0


def compare_sizes(
    run: Callable[[int | None], list[RankEvents]],
    sizes: Sequence[int],
    num_rounds: int,
    tell: Callable[[str], None],
) -> list[SizeTimes]:
    """Runs the default and each size once a round; the default comes first in the result, as in the first round.

    Args:
        run: trains the script's first steps with a bucket size, and returns the record; raises if it fails.
        sizes: in elements; empty for a few that fit the model, see :func:`sizes_for`.
        num_rounds: how often each is run.
        tell: gets a line before each run.

    Raises:
        TuningError: if no step was recorded.
    """
    candidates: list[int | None] = [None, *dict.fromkeys(sizes)]
    step_ms: dict[int | None, list[float]] = {}
    num_buckets: dict[int | None, int] = {}
    for number in range(num_rounds):
        place = 0
        # a list that may grow: the model's size is known after the first run
        while place < len(candidates):
            size = candidates[place] if number % 2 == 0 else candidates[-1 - place]
            name = "the default" if size is None else f"bucket_size={size:_}"
            tell(f"round {number + 1} of {num_rounds}: {name}")
            ranks = run(size)
            step_ms.setdefault(size, []).append(slowest_median_ms(ranks))
            num_buckets[size] = len(ranks[0].models[0].reduced_bytes)
            if len(candidates) == 1:
                candidates += sizes_for(sum(ranks[0].models[0].reduced_bytes) // 4)
            place += 1
    return [
        SizeTimes(
            size,
            num_buckets[size],
            step_ms[size],
            [ours / default for ours, default in zip(step_ms[size], step_ms[None], strict=True)],
        )
        for size in candidates
    ]


def sizes_for(numel: int) -> list[int]:
    """Returns sizes that make one bucket of a model of ``numel`` elements, about four, sixteen, and sixty-four."""
    return [size for size in (numel, numel // 4, numel // 16, numel // 64) if size >= SMALLEST_NUMEL] or [numel]


def slowest_median_ms(ranks: Sequence[RankEvents]) -> float:
    """Returns the median step of the slowest rank, of the script's first model. Raises TuningError if a rank recorded
    none."""
    if not ranks or not all(rank.models and rank.models[0].steps for rank in ranks):
        raise TuningError("no step was recorded: does the script train with megastrategy, for longer than --skip?")
    return max(statistics.median(step.step_ms for step in rank.models[0].steps) for rank in ranks)


def best_of(times: Sequence[SizeTimes]) -> SizeTimes | None:
    """Returns the size that is worth writing down, the fastest of them; None if the default is as good as any."""
    worth = [each for each in times if each.is_worth_it]
    return min(worth, key=lambda each: statistics.median(each.ratios), default=None)


def advice(best: SizeTimes | None, *, by_launcher: bool) -> str:
    """Says what to write down, and where.

    Args:
        best: the result of :func:`best_of`.
        by_launcher: whether the script runs under ``megastrategy.launch``, whose options are a file's.
    """
    if best is None:
        return "leave bucket_size out: no size was more than 5 % faster than the default, and faster in every round"
    if by_launcher:
        return f"write into the launcher's file, under megatron_ddp_config:  bucket_size: {best.bucket_size}"
    return f"write as an option of the strategy, the plugin or the config:  bucket_size={best.bucket_size:_}"
