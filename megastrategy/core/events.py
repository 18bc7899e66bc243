"""Events that the engine reports while it runs: one vocabulary for tests, the profiler and the simulator.

A listener is any callable that takes an :class:`Event`. Without a listener no event is made.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class EventKind(enum.Enum):
    """The kinds of events. Each says what the event's ``index`` is the number of."""

    FORWARD_START = "forward_start"
    """A forward of the wrapped module starts; index 1 if gradients are enabled, else 0. A forward that
    raises has no end."""
    FORWARD_END = "forward_end"
    """It ended (index as for FORWARD_START)."""
    BACKWARD_START = "backward_start"
    """A backward has reached an output of the forward, or the first gradient if it does not start from one (index: 0).
    A backward that raises has no end."""
    GRAD_READY = "grad_ready"
    """A parameter's gradient was accumulated (index: parameter)."""
    REDUCE_START = "reduce_start"
    """A bucket's reduction was launched (index: bucket)."""
    REDUCE_END = "reduce_end"
    """A bucket's reduction has been waited for (index: bucket)."""
    GATHER_START = "gather_start"
    """The all-gather of a bucket's parameters was launched (index: bucket)."""
    GATHER_END = "gather_end"
    """The all-gather of a bucket's parameters has been waited for (index: bucket)."""
    WAIT_START = "wait_start"
    """The caller's thread starts to wait for communication (index: 0 for gradients, 1 for parameters)."""
    WAIT_END = "wait_end"
    """The wait has ended (index as for WAIT_START). The time between the two is exposed communication."""
    LAYOUT_EXTENDED = "layout_extended"
    """Parameters joined, with buckets of their own (index: the first of them)."""
    LAYOUT_CHANGED = "layout_changed"
    """All parameters have moved to other buckets (index: the present number of buckets)."""
    BACKWARD_END = "backward_end"
    """A backward ended; index 1 if it was synchronised, else 0."""
    STEP_START = "step_start"
    """The optimizer starts to update this rank's shards (index: 0)."""
    STEP_END = "step_end"
    """The optimizer has updated this rank's shards (index: 0)."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One event: its kind, the index of its object, and ``time.perf_counter_ns()`` at that moment.

    ``ran_ns`` of a REDUCE_END or GATHER_END is the begin and end of the collective, by the same clock, if known (gloo):
    the wait may start long after its end.
    """

    kind: EventKind
    index: int
    time_ns: int = dataclasses.field(default_factory=time.perf_counter_ns)
    ran_ns: tuple[int, int] | None = None


Listener = Callable[[Event], None]


def emit(listener: Listener | None, kind: EventKind, index: int, ran_ns: tuple[int, int] | None = None) -> None:
    """Reports an event, if there is a listener."""
    if listener is not None:
        listener(Event(kind, index, ran_ns=ran_ns))


def combine_listeners(listeners: Sequence[Listener]) -> Listener | None:
    """Returns a listener that calls all of them; None if there is none, so that the engine makes no events."""
    # A single listener is called directly: an event is made for every gradient, inside backward.
    if len(listeners) <= 1:
        return listeners[0] if listeners else None

    def call_all(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return call_all


_NOTHING = nullcontext()


def profiler_range(what: str, number: int | None = None) -> AbstractContextManager[object]:
    """Returns a range ``megastrategy::reduce 3`` around a block if the calling thread is being profiled,
    or an empty context."""
    if not torch._C._autograd._profiler_enabled():  # a tenth of a microsecond, where a range takes ten
        return _NOTHING
    name = what if number is None else f"{what} {number}"
    return torch.profiler.record_function(f"megastrategy::{name}")
