"""Draws a cut model: what each stage does when, and its memory against its card's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .cards import Card
from .partitions import Plan

_FORWARD = "#7fb3d5"
_BACKWARD = "#2e6da4"
_MEMORY = "#58a55c"
_TOO_MUCH = "#c62828"
_CAPACITY = "#e6e6e6"
_MOST_NUMBERED = 16
"""Microbatches of more than that would have no room for their numbers."""


def draw(plan: Plan, cards: Sequence[Card], path: Path) -> None:
    """Writes a picture, in the format of the file's ending.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: for an ending that it does not know.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: nothing of the caller's is touched
    from matplotlib.patches import Patch

    num_stages = len(plan.split_spec)
    figure = Figure(figsize=(14, 1.6 + 0.55 * num_stages), layout="constrained")
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2, sharey=True, width_ratios=[4, 1])
    numbered = max((span.action.microbatch for span in plan.timeline), default=0) < _MOST_NUMBERED
    for card, action, start_ms, end_ms in plan.timeline:
        color = _FORWARD if action.is_forward else _BACKWARD
        time.broken_barh([(start_ms, end_ms - start_ms)], (card - 0.4, 0.8), facecolors=color, edgecolors="white")
        if numbered and end_ms > start_ms:
            time.text((start_ms + end_ms) / 2, card, str(action.microbatch), ha="center", va="center", fontsize=7)
    capacity = {card.name: card.memory_bytes for card in cards}
    for stage, (name, nbytes) in enumerate(zip(plan.stage_order, plan.memory, strict=True)):
        memory.barh(stage, capacity[name] / 1e9, height=0.8, color=_CAPACITY)
        memory.barh(stage, nbytes / 1e9, height=0.5, color=_MEMORY if nbytes <= capacity[name] else _TOO_MUCH)
    layers = zip(plan.stage_order, plan.split_spec, strict=True)
    time.set_yticks(range(num_stages), [f"{stage}: {name}, {n} layers" for stage, (name, n) in enumerate(layers)])
    time.invert_yaxis()
    time.set_xlabel(f"ms of a step: {plan.step_time:,.1f}, estimated from operations")
    memory.set_xlabel(f"GB, of the card's; T = {plan.waste:.2f}")
    for axis in (time, memory):
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
    labels = [(_FORWARD, "forward"), (_BACKWARD, "backward"), (_MEMORY, "memory"), (_CAPACITY, "the card's memory")]
    patches = [Patch(color=color, label=label) for color, label in labels]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
