"""Prints plans, as tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table

from ..rendering import new_table, size
from .cards import Card
from .memory import RankMemory, changes, rank_memory
from .one_step import MeasuredStep
from .partitions import Plan

_ROWS = {
    "weights": "weight_bytes",
    "frozen": "frozen_bytes",
    "gradients": "grad_bytes",
    "main params": "main_param_bytes",
    "optimizer": "state_bytes",
    "exchange": "exchange_bytes",
    "activations": "activation_bytes",
    "total": "total_bytes",
}
"""By row, the attribute of :class:`.RankMemory`."""
NUM_COLUMNS = 5
"""A table of so many numbers of ranks fits 80 characters; more are in another table below."""


def memory_tables(steps: Sequence[MeasuredStep], device_bytes: int) -> Iterator[RenderableType]:
    """Yields the tables by number of ranks, and under them what to change and how it was measured."""
    for first in range(0, len(steps), NUM_COLUMNS):
        yield _memory_table([rank_memory(step) for step in steps[first : first + NUM_COLUMNS]], device_bytes)
    for step in steps:
        memory = rank_memory(step)
        if memory.verdict(device_bytes) != "fits":
            yield f"on {step.dp_size:,} rank(s): {advice(step, device_bytes)}"
    # Ranks differ: a test shows what an optimizer of shards keeps, before its first step.
    for step in steps:
        unknown = step.unknown
        if unknown:
            yield (
                f"on {step.dp_size:,} rank(s), not counted: the optimizer state of {len(unknown)} parameter(s) "
                f"({unknown[0]}, ...), whose optimizer has made no step until another's was complete. Let it step in "
                "the first iteration to have it counted"
            )
    yield how(steps)


def _memory_table(memories: Sequence[RankMemory], device_bytes: int) -> Table:
    """A column for each number of ranks, and a row for each kind of bytes that one of them has."""
    table = new_table(f"bytes of a rank, of {size(device_bytes)}", "ranks", *(f"{m.dp_size:,}" for m in memories))
    for name, attribute in _ROWS.items():
        sizes = [getattr(memory, attribute) for memory in memories]
        if any(sizes):
            table.add_row(name, *map(size, sizes))
    table.add_row("", *(memory.verdict(device_bytes) for memory in memories))
    free = [device_bytes - memory.total_bytes for memory in memories]
    table.add_row("left", *(size(nbytes) if nbytes >= 0 else f"-{size(-nbytes)}" for nbytes in free))
    return table


def advice(step: MeasuredStep, device_bytes: int) -> str:
    """Says what would take less, and how much there would be."""
    memory = rank_memory(step)
    if memory.activation_bytes > device_bytes:
        return (
            f"activations alone take {size(memory.activation_bytes)}: fewer samples in a batch, or activation "
            "checkpointing"
        )
    smaller = changes(step, device_bytes)
    if not smaller:
        return "nothing that is known here takes less: fewer samples in a batch, or activation checkpointing"
    return "; ".join(f"{change.what}: {size(change.total_bytes)}" for change in smaller[:4])


def how(steps: Sequence[MeasuredStep]) -> str:
    """Says how activations were found out."""
    if any(step.computes for step in steps):
        return "activations: counted in a real step of the script on the CPU"
    computed = max(step.num_computed for step in steps)
    but = f"; {computed} operation(s) whose shapes depend on values had what was there" if computed else ""
    return f"activations: counted in a step of the script whose large tensors had shapes and no values{but}"


def memory_json(steps: Sequence[MeasuredStep], device_bytes: int) -> dict[str, Any]:
    """The same for programs: bytes, by number of ranks."""
    sizes = []
    for step in steps:
        memory = rank_memory(step)
        verdict = memory.verdict(device_bytes)
        sizes.append(
            {
                **dataclasses.asdict(memory),
                "total_bytes": memory.total_bytes,
                "verdict": verdict,
                "free_bytes": device_bytes - memory.total_bytes,
                "not_counted": list(step.unknown),
                "changes": [] if verdict == "fits" else [dataclasses.asdict(c) for c in changes(step, device_bytes)],
            }
        )
    return {"device_bytes": device_bytes, "ranks": sizes}


def partition_table(plan: Plan, cards: Sequence[Card]) -> Table:
    """The stages of a plan, beside what their cards have; both objectives in the title."""
    title = f"{plan.step_time:,.1f} ms a step (estimated from operations), T = {plan.waste:.2f}"
    columns = (Column(name, justify="right") for name in ("layers", "memory", "of"))
    table = Table("stage", "card", *columns, title=title, title_justify="left")
    capacity = {card.name: card.memory_bytes for card in cards}
    first = 0
    for number, (card, layers, nbytes) in enumerate(zip(plan.stage_order, plan.split_spec, plan.memory, strict=True)):
        table.add_row(str(number), card, f"{first} to {first + layers - 1}", size(nbytes), size(capacity[card]))
        first += layers
    return table
