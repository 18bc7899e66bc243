"""Simulates a pipeline's step from the times of its stages. Pure functions.

Orders of work are those of the papers: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), and the
interleaved 1F1B of Megatron-LM (arXiv 2104.04473), in which stage s is on card ``s % num_cards``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

Schedule = Literal["1f1b", "gpipe", "interleaved"]


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
    """The number of microbatches whose saved tensors a stage holds at once, with one stage a card."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)


def actions(schedule: Schedule, num_cards: int, num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """The order of work on each card.

    Raises:
        ValueError: if the stages do not divide over the cards, or for "interleaved" the microbatches do not.
    """
    if num_stages % num_cards:
        raise ValueError(f"{num_stages} stages do not divide over {num_cards} cards")
    if schedule != "interleaved":
        if num_stages != num_cards:
            raise ValueError(f"{schedule!r} has one stage a card, got {num_stages} on {num_cards}: pass 'interleaved'")
        return [_plain(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    if num_microbatches % num_cards:
        raise ValueError(f"'interleaved' takes a multiple of {num_cards} microbatches, got {num_microbatches}")
    return [_interleaved(card, num_cards, num_stages // num_cards, num_microbatches) for card in range(num_cards)]


def _plain(schedule: Schedule, stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    ahead = num_in_flight(schedule, stage, num_stages, num_microbatches)
    order = [Action(True, stage, number) for number in range(ahead)]
    for number in range(num_microbatches):
        order.append(Action(False, stage, number))
        if ahead + number < num_microbatches:
            order.append(Action(True, stage, ahead + number))
    return order


def _interleaved(card: int, num_cards: int, num_chunks: int, num_microbatches: int) -> list[Action]:
    def at(place: int, *, is_forward: bool) -> Action:
        # Each chunk takes as many microbatches as there are cards, and then it is the next one's turn.
        round_, within = divmod(place, num_cards * num_chunks)
        chunk, number = divmod(within, num_cards)
        chunk = chunk if is_forward else num_chunks - 1 - chunk
        return Action(is_forward, chunk * num_cards + card, round_ * num_cards + number)

    total = num_chunks * num_microbatches
    ahead = min(total, 2 * (num_cards - card - 1) + (num_chunks - 1) * num_cards)
    order = [at(place, is_forward=True) for place in range(ahead)]
    for place in range(total):
        if ahead + place < total:
            order.append(at(ahead + place, is_forward=True))
        order.append(at(place, is_forward=False))
    return order


class Span(NamedTuple):
    """An action on a card, and the milliseconds from the step's start at which it begins and ends."""

    card: int
    action: Action
    start_ms: float
    end_ms: float


def step_ms(
    stages: Sequence[StageTimes],
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    *,
    num_cards: int | None = None,
) -> float:
    """The milliseconds from the first forward to the last backward; arguments as for :func:`timeline`."""
    return max(span.end_ms for span in timeline(stages, num_microbatches, schedule, num_cards=num_cards))


def timeline(
    stages: Sequence[StageTimes],
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    *,
    num_cards: int | None = None,
) -> list[Span]:
    """Lists what each card does when, in a step.

    Args:
        stages: in the order of the model.
        num_microbatches: of a step.
        schedule: in which order a card works.
        num_cards: as many as stages if it is not given.
    """
    num_cards = len(stages) if num_cards is None else num_cards
    orders = actions(schedule, num_cards, len(stages), num_microbatches)
    ended: dict[Action, float] = {}
    spans: list[Span] = []
    now = [0.0] * num_cards
    place = [0] * num_cards
    left = sum(map(len, orders))
    while left:
        before = left
        for card, order in enumerate(orders):
            while place[card] < len(order):
                action = order[place[card]]
                needed = _needed(action, len(stages))
                if needed is not None and needed not in ended:
                    break
                stage = stages[action.stage]
                length = stage.forward_ms if action.is_forward else stage.backward_ms
                start = max(now[card], ended[needed] if needed else 0.0)
                now[card] = ended[action] = start + length
                spans.append(Span(card, action, start, now[card]))
                place[card] += 1
                left -= 1
        # An order in which cards wait for each other would be one that no pipeline can run.
        assert left < before, "every order can be run to its end"
    return spans


def _needed(action: Action, num_stages: int) -> Action | None:
    """The work that has to be done before; None for the first stage's forwards."""
    if action.is_forward:
        return Action(True, action.stage - 1, action.microbatch) if action.stage else None
    if action.stage == num_stages - 1:
        return Action(True, action.stage, action.microbatch)
    return Action(False, action.stage + 1, action.microbatch)
