"""Plans a pipeline over cards that differ: which card has which layers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

from torch import Tensor, nn

from .cards import Card
from .layers import measure_layers
from .schedule import Schedule
from .search import Candidate, Objective, Question, TooManyError, evaluate, search


@dataclasses.dataclass(frozen=True)
class Plan:
    """A cut of a model for cards that differ.

    Attributes:
        split_spec: how many layers each stage has.
        stage_order: the card of each stage, by name.
        memory: by stage, the most bytes at once.
        step_time: of the simulated step, in milliseconds; an estimate from operations, see :class:`.Card`.
        waste: the study's weighted memory waste ratio T.
        why: what it was compared with.
    """

    split_spec: tuple[int, ...]
    stage_order: tuple[str, ...]
    memory: tuple[int, ...]
    step_time: float
    waste: float
    why: str


class NothingFitsError(ValueError):
    """Says that no cut of a model fits its cards."""


def plan(
    layers: Sequence[nn.Module],
    sample: Tensor,
    *,
    devices: Sequence[Card],
    microbatches: int,
    frozen: Collection[int] | None = None,
    keep_together: Sequence[tuple[int, int]] = (),
    objective: Objective = "time",
    schedule: Schedule = "1f1b",
    slack: float = 0.0,
    split_spec: Sequence[int] | None = None,
) -> Plan:
    """Finds the best of all orders of the cards and all partitions of the layers.

    Args:
        layers: in order; each takes what the one before returns, one tensor. They are run by their shapes alone,
            and may be on meta.
        sample: one microbatch.
        devices: one for each stage, in any order.
        microbatches: of a step.
        frozen: the layers that are not trained; None for those whose parameters require no gradients.
        keep_together: pairs of first and last layer of groups that are not cut.
        objective: "time", or "waste" for the study's ratio.
        schedule: "1f1b" or "gpipe".
        slack: the part of a card's memory that stays free.
        split_spec: how many layers each stage has, to be told what that takes, fitting or not; ``devices`` then are in
            the order of stages. None for a search.

    Raises:
        NothingFitsError: if no partition fits.
        ValueError: for what cannot be, by name.
    """
    if objective not in ("time", "waste"):
        raise ValueError(f"objective={objective!r}: expected 'time' or 'waste'")
    wrong = [device for device in devices if not isinstance(device, Card)]
    if wrong:
        raise ValueError(f"devices has {wrong[0]!r}: expected cards, such as parse_cards('3090:2,2080ti:1')")
    if schedule == "1f1b" and 0 < microbatches < len(devices):
        raise ValueError(
            f"{microbatches} microbatches for {len(devices)} cards: expected at least as many with '1f1b', as torch's "
            "schedule does; 'gpipe' takes fewer"
        )
    measured = measure_layers(layers, sample, frozen)
    question = Question(measured, devices, microbatches, schedule, keep_together, slack)
    return plan_of(question, objective) if split_spec is None else _of_split(question, split_spec)


def _of_split(question: Question, split: Sequence[int]) -> Plan:
    """The plan of a given cut, beside the best one."""
    num_layers = len(question.layers)
    num_cards = len(question.cards)
    said = "-".join(map(str, split))
    if sum(split) != num_layers or min(split, default=0) < 1:
        raise ValueError(f"the split {said} has {sum(split)} layers: expected {num_layers}, at least one a stage")
    if len(split) != num_cards:
        raise ValueError(f"the split {said} has {len(split)} stages, for {num_cards} cards: expected one for each")
    starts = [0, *itertools.accumulate(split)]
    for stage, (start, end) in enumerate(itertools.pairwise(starts)):
        if num_cards > 1 and not any(layer.has_params for layer in question.layers[start:end]):
            names = ", ".join(layer.name for layer in question.layers[start:end])
            raise ValueError(
                f"the split {said} has a stage {stage} without parameters ({names}), for which torch has no optimizer: "
                "move a layer with parameters there"
            )
    candidate = evaluate(question, question.cards, split)
    full = [card for card, peak in zip(question.cards, candidate.peak_bytes, strict=True) if peak > card.memory_bytes]
    fits = f"it does not fit the memory of {', '.join(card.name for card in full)}" if full else "it fits"
    fastest, unsure = _search(question, "time")
    than = "nothing that fits is known to be better" if fastest is None else f"the fastest is {_said(fastest)}"
    return _plan(candidate, f"as you gave it; {fits}; {than}{unsure}")


def _search(question: Question, objective: Objective) -> tuple[Candidate | None, str]:
    """The best candidate; and what is to be said where better ones may not have been looked at."""
    try:
        return search(question, objective), ""
    except TooManyError as error:
        said = (
            f" (the best that was found; not all were looked at: {error}. Layers that are kept together are fewer cuts)"
        )
        return error.best, said


def _plan(candidate: Candidate, why: str) -> Plan:
    names = tuple(card.name for card in candidate.order)
    return Plan(tuple(candidate.split), names, candidate.peak_bytes, candidate.step_ms, candidate.waste, why)


def plan_of(question: Question, objective: Objective) -> Plan:
    """The plan for layers that were measured. Raises NothingFitsError if no partition fits."""
    fastest, unsure = _search(question, "time")
    fullest, unsure_of_waste = _search(question, "waste")
    if fastest is None or fullest is None:
        largest = max(question.layers, key=lambda layer: layer.fixed_bytes + layer.saved_bytes)
        memory = sum(card.memory_bytes for card in question.cards)
        need = sum(layer.fixed_bytes for layer in question.layers)
        raise NothingFitsError(
            f"none of {question.num_candidates:,} partitions fits{unsure}: weights, gradients and optimizer take "
            f"{need:,} bytes of {memory:,}, and layer {largest.name} with what it saves "
            f"{largest.fixed_bytes + largest.saved_bytes:,}. Take smaller microbatches, freeze layers, or add cards"
        )
    best = fastest if objective == "time" else fullest
    why = (
        f"best of {question.num_candidates:,} orders and partitions. By time {_said(fastest)}{unsure}; by waste "
        f"{_said(fullest)}{unsure_of_waste}, which takes {fullest.step_ms / fastest.step_ms:.2f} times as long: T is "
        "low where cards are full, not where a step is fast"
    )
    return _plan(best, why)


def _said(candidate: Candidate) -> str:
    split = "-".join(map(str, candidate.split))
    cards = " ".join(card.name for card in candidate.order)
    return f"{split} on {cards} ({candidate.step_ms:,.1f} ms, T {candidate.waste:.2f})"
