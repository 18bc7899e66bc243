"""Events of made-up steps in milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from megastrategy.core import Event, EventKind

MS = 1_000_000
FORWARD, BACKWARD, STEP = (
    ("forward_start", "forward_end"),
    ("backward_start", "backward_end"),
    ("step_start", "step_end"),
)
REDUCE, GATHER, WAIT = ("reduce_start", "reduce_end"), ("gather_start", "gather_end"), ("wait_start", "wait_end")
Row = tuple[float, Event]


def at(ms: float, kind: str, index: int = 0, ran: tuple[float, float] | None = None) -> Row:
    ran_ns = (round(ran[0] * MS), round(ran[1] * MS)) if ran else None
    return ms, Event(EventKind(kind), index, round(ms * MS), ran_ns)


def span(pair: tuple[str, str], start: float, end: float, index: int = 0) -> list[Row]:
    return [at(start, pair[0], index), at(end, pair[1], index)]


def collective(
    pair: tuple[str, str], bucket: int, launched: float, ran: tuple[float, float] | None, waited: float
) -> list[Row]:
    return [at(launched, pair[0], bucket), at(waited, pair[1], bucket, ran)]


def in_order(*rows: Sequence[Row], after: float = 0.0) -> list[Event]:
    """As the engine reports them; ``after`` is added to all times (ms)."""
    events = sorted(itertools.chain(*rows), key=lambda row: row[0])
    shift = round(after * MS)
    return [
        Event(
            event.kind,
            event.index,
            event.time_ns + shift,
            (event.ran_ns[0] + shift, event.ran_ns[1] + shift) if event.ran_ns else None,
        )
        for _, event in events
    ]


def one_step(after: float = 0.0) -> list[Event]:
    """100 ms: forward 20, backward 40 with 10 of waiting, step 20, 15 of waiting for parameters; two buckets.

    The second bucket waits for the first one; half of it is hidden. Nothing hides the gathers.
    """
    return in_order(
        span(FORWARD, 0, 20, 1),
        [at(22, "backward_start"), at(62, "backward_end", 1)],
        collective(REDUCE, 0, 30, (30, 45), 53),
        collective(REDUCE, 1, 40, (45, 60), 61),
        span(WAIT, 52.5, 61.5, 0),
        span(STEP, 63, 84),
        collective(GATHER, 1, 85, (85, 92), 92),
        collective(GATHER, 0, 85.5, (92, 99), 99),
        span(WAIT, 86, 100, 1),
        after=after,
    )


def in_ms(spans: Any) -> list[tuple[str, float, float]]:
    return [(span.name, span.start_ns / MS, span.end_ns / MS) for span in spans]
