"""Simulates a pipeline's step from the times of its stages, one on each card. Pure functions.

Orders of work are those of the papers: GPipe (arXiv 1811.06965) and 1F1B (PipeDream-Flush, arXiv 2006.09503).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

Schedule = Literal["1f1b", "gpipe"]


class Action(NamedTuple):
    """Work on one microbatch in one stage."""

    is_forward: bool
    stage: int
    microbatch: int


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """Milliseconds of one microbatch's forward and backward in one stage."""

    forward_ms: float
    backward_ms: float


def num_in_flight(schedule: Schedule, stage: int, num_stages: int, num_microbatches: int) -> int:
    """The number of microbatches whose saved tensors a stage holds at once."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)


def actions(schedule: Schedule, stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """The order of work of a stage."""
    ahead = num_in_flight(schedule, stage, num_stages, num_microbatches)
    order = [Action(True, stage, number) for number in range(ahead)]
    for number in range(num_microbatches):
        order.append(Action(False, stage, number))
        if ahead + number < num_microbatches:
            order.append(Action(True, stage, ahead + number))
    return order


def step_ms(stages: Sequence[StageTimes], num_microbatches: int, schedule: Schedule = "1f1b") -> float:
    """The milliseconds from the first forward to the last backward; arguments as for :func:`ends_ms`."""
    return max(ends_ms(stages, num_microbatches, schedule))


def ends_ms(stages: Sequence[StageTimes], num_microbatches: int, schedule: Schedule = "1f1b") -> list[float]:
    """The milliseconds from the first forward to the last backward of each stage.

    Args:
        stages: in the order of the model.
        num_microbatches: of a step.
        schedule: the order in which each card works.
    """
    num_stages = len(stages)
    orders = [actions(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    ended: dict[Action, float] = {}
    now = [0.0] * num_stages
    place = [0] * num_stages
    while len(ended) < sum(map(len, orders)):
        num_ended = len(ended)
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                action = order[place[stage]]
                needed = _needed(action, num_stages)
                if needed is not None and needed not in ended:
                    break
                times = stages[stage]
                length = times.forward_ms if action.is_forward else times.backward_ms
                now[stage] = max(now[stage], ended[needed] if needed else 0.0) + length
                ended[action] = now[stage]
                place[stage] += 1
        # An order in which cards wait for each other would be one that no pipeline can run.
        assert len(ended) > num_ended, "every order can be run to its end"
    return now


def _needed(action: Action, num_stages: int) -> Action | None:
    """The work that has to be done before; None for the first stage's forwards."""
    if action.is_forward:
        return Action(True, action.stage - 1, action.microbatch) if action.stage else None
    if action.stage == num_stages - 1:
        return Action(True, action.stage, action.microbatch)
    return Action(False, action.stage + 1, action.microbatch)
