"""Predicts steps at many numbers of ranks, out of a profile or of operations and a device's speed, and prints them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table

from ...core import DistributedDataParallelConfig, EventKind
from .links import describe_link
from .one_step import MeasuredStep
from .recorded_work import Measured
from .simulator import Link, Processor, SimulatedStep
from .steps import Network, Work, advice, settings, simulate_step


@dataclasses.dataclass(frozen=True)
class Training:
    """Holds what is predicted: a rank's work, its options and what it runs on.

    Attributes:
        how: where that is from, for people.
    """

    work: Work
    config: DistributedDataParallelConfig
    network: Network
    processor: Processor
    how: str


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A number of ranks, with the step as it is set up and the options that would be faster.

    ``step`` is None where the options contradict the number of ranks, and ``advice`` says how.
    """

    dp_size: int
    step: SimulatedStep | None
    advice: str


def of_profile(measured: Measured, link: Link | None, between: Link | None) -> Training:
    """A training that was profiled, behind its own link or another. Raises ValueError without any link."""
    own = link or measured.link
    if own is None:
        raise ValueError(
            "the profile does not tell what its link carries: say it with --link, such as --link 25GB/s,5us"
        )
    recorded = measured.recorded
    told = f"profiled on {recorded.dp_size} rank(s): {measured.step_ms:.1f} ms from step to step"
    if (simulated_ms := measured.simulated_ms) is not None:
        told += f", of which the simulation finds {simulated_ms:.1f}"
    where = "the link as it was there" if link is None else "the link as you gave it"
    return Training(
        measured.work,
        recorded.config,
        Network(own, between),
        measured.processor,
        f"{told}; {where}, {describe_link(own)}",
    )


def of_operations(step: MeasuredStep, flops: float, link: Link, between: Link | None) -> Training:
    """A training whose operations were counted, on devices that do ``flops`` of them in a second. Raises ValueError if
    none was counted."""
    model, counted = step.models[0], step.flops
    starts = [number for number, (kind, _, _) in enumerate(counted) if kind is EventKind.BACKWARD_START]
    if not counted or not starts or counted[-1][2] == 0:
        raise ValueError("the script's step has no products or convolutions, from which its time could be estimated")
    ms = 1e3 / flops
    num_microbatches = len(starts)
    last = counted[starts[-1]][2]
    end = next(number for kind, _, number in reversed(counted) if kind is EventKind.BACKWARD_END)
    length = max(end - last, 1.0)
    ready = {
        index: min(1.0, (number - last) / length)
        for kind, index, number in counted[starts[-1] :]
        if kind is EventKind.GRAD_READY
    }
    forward = last - (counted[starts[-2]][2] if num_microbatches > 1 else 0.0)
    if num_microbatches > 1:
        forward -= length
    work = Work(
        tuple(model.layout.params),
        ready,
        num_microbatches,
        forward_ms=max(0.0, forward) * ms,
        loss_ms=0.0,
        backward_ms=length * ms,
        before_step_ms=0.0,
        step_ms_per_numel=0.0,
        step_ms_per_bucket=0.0,
        other_ms=0.0,
    )
    how = (
        f"an estimate from {forward + length:.3g} operations a microbatch and {flops:.3g} a second, without the "
        f"optimizer's step and what else takes time; {describe_link(link)}"
    )
    return Training(work, model.config, Network(link, between), Processor(), how)


def predict(training: Training, ranks: Sequence[int]) -> list[Prediction]:
    """Simulates the training on each number of ranks."""
    return [_predict(training, dp_size) for dp_size in ranks]


def _predict(training: Training, dp_size: int) -> Prediction:
    given = (training.config, dp_size, training.network, training.processor)
    try:
        step = simulate_step(training.work, *given)
    except ValueError as error:
        return Prediction(dp_size, None, str(error))
    if dp_size == 1:
        return Prediction(dp_size, step, "")
    return Prediction(dp_size, step, advice(settings(training.work, *given), training.config))


def time_tables(training: Training, predictions: Sequence[Prediction]) -> Iterator[RenderableType]:
    """Yields the table by number of ranks, what would be faster, and where it is from."""
    alone_ms = _alone_ms(training)
    names = ("step", "computing", "waits for gradients", "for weights", "slowed down by", "on the wire", "of one rank")
    columns = (Column(name, justify="right") for name in names)
    table = Table("ranks", *columns, title="Milliseconds of a step, simulated", title_justify="left")
    for each in predictions:
        if (step := each.step) is None:
            table.add_row(f"{each.dp_size:,}", *[""] * 7)
            continue
        parts = (
            step.step_ms,
            step.compute_ms,
            step.exposed_gradients_ms,
            step.exposed_parameters_ms,
            step.slowed_ms,
            step.wire_ms,
        )
        table.add_row(f"{each.dp_size:,}", *(f"{ms:,.1f}" for ms in parts), f"{alone_ms / step.step_ms:.0%}")
    yield table
    for said in dict.fromkeys(each.advice for each in predictions if each.advice):
        where = [f"{each.dp_size:,}" for each in predictions if each.advice == said]
        yield f"on {', '.join(where)} ranks: {said}"
    yield f"time: {training.how}"


def time_json(training: Training, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The same for programs, in milliseconds and bytes."""
    alone_ms = _alone_ms(training)
    return {
        "how": training.how,
        "ranks": [
            {
                "dp_size": each.dp_size,
                "advice": each.advice,
                **({} if each.step is None else dataclasses.asdict(each.step)),
                **({} if each.step is None else {"share_of_one_rank": alone_ms / each.step.step_ms}),
            }
            for each in predictions
        ],
    }


def _alone_ms(training: Training) -> float:
    """The length of a step on one rank, which sends nothing. Instances divide no rank."""
    config = dataclasses.replace(training.config, num_distributed_optimizer_instances=1)
    params = tuple(dataclasses.replace(spec, domain=None) for spec in training.work.params)
    work = dataclasses.replace(training.work, params=params)
    return simulate_step(work, config, 1, training.network, training.processor).step_ms
