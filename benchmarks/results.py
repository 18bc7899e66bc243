"""Turns the ranks' measurements into the numbers that are published, and checks that all engines trained the same."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cases import Case
from .engines import BASELINE, EngineSpec
from .measure import Alone, Timing

_EXACT_STEPS = 10
"""Number of steps whose losses are held to the case's tolerance. Sums in another order differ in their last bits, and
AdamW amplifies that where gradients are near zero; so later steps get a hundred times as much."""
_LATER_FACTOR = 100.0
_LARGEST_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles of samples."""

    median: float
    q1: float
    q3: float
    samples: list[float]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Computes the spread of one sample or more."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], list(samples))
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, q1, q3, list(samples))

    def __format__(self, form: str) -> str:
        """Writes median and quartiles, each in a format like ``.2f``."""
        return f"{self.median:{form}} ({self.q1:{form}} to {self.q3:{form}})"


def write_json(path: Path, content: Any) -> None:
    """Writes figures to a file, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class EngineResult:
    """One engine in one case on some ranks. Times are of the slowest rank, bytes of the rank with the most, traffic the
    mean of the ranks. What was not measured is None.

    Attributes:
        step_ms: by round.
        ratio: to torch DDP, by round.
        over_bound_ms: step time less that of the engine without communication, by round.
        cpu_ms: processor time a step of one rank, all threads, by round: the ranks' mean.
        in_step_ms: of a step, the time in the optimizer's ``step()``, by round: the rank's with the most.
        in_step_cpu_ms: of that, processor time of the thread that called it.
        orthogonalising_cpu_ms: of that, in the iterations of torch's Muon.
        reported_wait_ms: a step, from the engine's own events, when it runs alone.
        received_bytes: payload a step a rank; what is received is what is sent.
        losses: rank 0's, by step.
        loss_difference: the largest relative one to torch DDP's on any rank, in the first steps and in all.
        losses_agree: whether both are within the case's tolerance; None for engines without communication.
    """

    name: str
    about: str
    step_ms: Spread
    ratio: Spread
    over_bound_ms: Spread | None
    cpu_ms: Spread
    in_step_ms: Spread
    in_step_cpu_ms: Spread
    orthogonalising_cpu_ms: Spread
    reported_wait_ms: float | None
    received_bytes: float
    interface_bytes: float | None
    tensor_bytes: int
    heap_bytes: int | None
    rss_bytes: int
    losses: list[float]
    loss_difference: tuple[float, float] | None
    losses_agree: bool | None


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """One case on some ranks."""

    case: str
    about: str
    dtype: str
    accumulate: int
    num_params: int
    num_elements: int
    num_ranks: int
    num_rounds: int
    num_steps: int
    link_mbit: float
    groups: list[list[str]]
    """Engines that were measured in the same run; more than one where they do not fit into memory together."""
    engines: list[EngineResult]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Names what was asked for and not measured."""

    case: str
    num_ranks: int
    engine: str | None
    reason: str

    def describe(self) -> str:
        """Says in words what it is."""
        where = f"{self.case} on {self.num_ranks} ranks"
        return f"{where}, {self.engine}" if self.engine else where


@dataclasses.dataclass
class Report:
    """Everything of one run of the program."""

    environment: dict[str, Any]
    cases: list[CaseResult] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    failed: list[Skipped] = dataclasses.field(default_factory=list)

    def disagreements(self) -> list[str]:
        """A line for every engine that trained to other losses than torch DDP."""
        return [
            f"{case.case} on {case.num_ranks} ranks: {engine.name} trained to other losses than {BASELINE} "
            f"(relative difference {engine.loss_difference[0]:.1e} in the first {_EXACT_STEPS} steps, "
            f"{engine.loss_difference[1]:.1e} in all)"
            for case in self.cases
            for engine in case.engines
            if engine.losses_agree is False and engine.loss_difference is not None
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {"schema": 1, **dataclasses.asdict(self)}


def summarise(
    case: Case,
    specs: Sequence[EngineSpec],
    num_steps: int,
    groups: Sequence[Sequence[Timing]],
    alone: Mapping[str, Sequence[Alone]],
) -> CaseResult:
    """Puts the ranks' measurements together.

    Args:
        case: what was trained.
        specs: the engines.
        num_steps: a block.
        groups: for each group of engines that were measured together, the ranks' timings.
        alone: by engine, the ranks' measurements.
    """
    num_params, num_elements = case.count_params()
    return CaseResult(
        case=case.name,
        about=case.about,
        dtype=case.dtype,
        accumulate=case.accumulate,
        num_params=num_params,
        num_elements=num_elements,
        num_ranks=len(groups[0]),
        num_rounds=len(groups[0][0].blocks[BASELINE]),
        num_steps=num_steps,
        link_mbit=statistics.median(ranks[0].link_mbit for ranks in groups),
        groups=[list(ranks[0].blocks) for ranks in groups],
        engines=[_engine_result(case, spec, groups, alone[spec.name]) for spec in specs if spec.name in alone],
    )


def _engine_result(
    case: Case, spec: EngineSpec, groups: Sequence[Sequence[Timing]], alone: Sequence[Alone]
) -> EngineResult:
    name = spec.name
    step_ms: list[float] = []
    ratios: list[float] = []
    over_bound_ms: list[float] = []
    cpu_ms: list[float] = []
    in_step_ms: list[float] = []
    in_step_cpu_ms: list[float] = []
    orthogonalising_cpu_ms: list[float] = []
    differences: list[tuple[float, float]] = []
    losses: list[float] = []
    for ranks in groups:
        if name not in ranks[0].blocks:
            continue
        own, baseline = _most(ranks, name), _most(ranks, BASELINE)
        step_ms += own
        ratios += [mine / theirs for mine, theirs in zip(own, baseline, strict=True)]
        bound = "bound-fp32" if spec.dtype == "fp32" else "bound"
        if bound in ranks[0].blocks:
            over_bound_ms += [mine - floor for mine, floor in zip(own, _most(ranks, bound), strict=True)]
        cpu_ms += [statistics.fmean(blocks) for blocks in _by_round(ranks, name, "cpu_ms")]
        in_step_ms += _most(ranks, name, "in_step_ms")
        in_step_cpu_ms += _most(ranks, name, "in_step_cpu_ms")
        orthogonalising_cpu_ms += _most(ranks, name, "orthogonalising_cpu_ms")
        losses = ranks[0].losses[name]
        differences += [_difference(rank.losses[name], rank.losses[BASELINE]) for rank in ranks]
    worst = (max(first for first, _ in differences), max(all_ for _, all_ in differences))
    heaps = [rank.heap_bytes for rank in alone if rank.heap_bytes is not None]
    interface = [rank.interface_bytes for rank in alone if rank.interface_bytes is not None]
    waits = [rank.reported_wait_ms for rank in alone if rank.reported_wait_ms is not None]
    agree = worst[0] <= case.loss_tolerance and worst[1] <= min(_LATER_FACTOR * case.loss_tolerance, _LARGEST_TOLERANCE)
    return EngineResult(
        name=name,
        about=spec.about,
        step_ms=Spread.of(step_ms),
        ratio=Spread.of(ratios),
        over_bound_ms=Spread.of(over_bound_ms) if over_bound_ms else None,
        cpu_ms=Spread.of(cpu_ms),
        in_step_ms=Spread.of(in_step_ms),
        in_step_cpu_ms=Spread.of(in_step_cpu_ms),
        orthogonalising_cpu_ms=Spread.of(orthogonalising_cpu_ms),
        reported_wait_ms=max(waits) if waits else None,
        received_bytes=statistics.fmean(rank.received_bytes for rank in alone),
        interface_bytes=statistics.fmean(interface) if interface else None,
        tensor_bytes=max(rank.tensor_bytes for rank in alone),
        heap_bytes=max(heaps) if heaps else None,
        rss_bytes=max(rank.rss_bytes for rank in alone),
        losses=losses,
        loss_difference=worst if spec.communicates else None,
        losses_agree=agree if spec.is_exact else None,
    )


def _by_round(ranks: Sequence[Timing], name: str, field: str) -> list[list[float]]:
    """Returns the ranks' values for each round."""
    rounds = zip(*(rank.blocks[name] for rank in ranks), strict=True)
    return [[getattr(block, field) for block in blocks] for blocks in rounds]


def _most(ranks: Sequence[Timing], name: str, field: str = "step_ms") -> list[float]:
    """Returns for each round that of the rank with the most."""
    return [max(blocks) for blocks in _by_round(ranks, name, field)]


def _difference(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """The largest relative difference in the first steps, and in all; infinite if a loss is not finite."""
    relative = [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, reference, strict=True)]
    relative = [value if math.isfinite(value) else math.inf for value in relative]
    return max(relative[:_EXACT_STEPS]), max(relative)
