"""The phases of a backward, and where one begins and ends.

[Note: the outermost graph]
torch runs a callback when the graph that it was queued in ends. A re-entrant checkpoint runs a graph inside another,
and its parameters are reached there, so what they queue would come too early to send what is left. The outputs of a
forward are in the outermost graph: the first gradient that reaches one of them queues the end there. Where no forward
told of outputs (a loss of parameters alone), the graph that reaches a parameter first has to do.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..buffers import NO_GRAPH_TASK
from ..errors import MegastrategyError


class BackwardPhase(enum.Enum):
    """The state of a reducer, from the first gradient of a backward to the end of its reductions."""

    IDLE = enum.auto()
    """No backward has reached a parameter. A first gradient leads to ACCUMULATING or SYNCHRONISING; a step of gradients
    that no backward has reduced leads to WAITING."""
    ACCUMULATING = enum.auto()
    """A backward that is not synchronised is under way. IDLE when it ends. After an error the phase stays, until the
    next forward, or a backward that is tried again, drops what is left."""
    SYNCHRONISING = enum.auto()
    """A synchronised backward is under way: complete buckets are launched. IDLE when it ends, and the rest is launched.
    After an error as ACCUMULATING."""
    WAITING = enum.auto()
    """The ranks agree, and wait for what was launched. IDLE afterwards, also after an error."""


@dataclasses.dataclass
class Preparation:
    """Forwards of the wrapped model since the last backward whose gradients were sent; see reducer's [Note: which
    backward synchronises].

    Attributes:
        syncs: whether one of them trained and ended outside ``no_sync``.
        accumulates: whether one trained under ``no_sync``.
        inside_forward: whether one is under way whose backwards are inside of it (Lightning's manual optimization).
        graph: torch's number of the backward that the last forward was inside of.
        spent_in: that of a backward that a synchronised one has ended inside of; the rest of it is synchronised too.
    """

    syncs: bool = False
    accumulates: bool = False
    inside_forward: bool = False
    graph: int = NO_GRAPH_TASK
    spent_in: int = NO_GRAPH_TASK

    def add(self, *, syncs: bool) -> None:
        """A forward that trains has ended."""
        self.graph = torch._C._current_graph_task_id()
        if self.spent_in not in (
            NO_GRAPH_TASK,
            self.graph,
        ):  # that backward is over: losses with a cache, step after step
            self.clear()
        if syncs:
            self.syncs = True
        else:
            self.accumulates = True

    def replace(self, *, syncs: bool) -> None:
        """The next backward was decided about by itself."""
        self.syncs, self.accumulates = syncs, not syncs

    def end(self, *, inside: bool) -> None:
        """A synchronised backward has ended. The rest of one that it was inside of is synchronised as well."""
        if inside:
            self.spent_in = self.graph
        else:
            self.clear()

    def clear(self) -> None:
        """The backward that was prepared is over."""
        self.syncs = self.accumulates = False
        self.spent_in = NO_GRAPH_TASK

    def __bool__(self) -> bool:
        return self.syncs or self.accumulates or self.inside_forward

    @property
    def decision(self) -> bool | None:
        """Whether the next backward is synchronised; None where that is asked when it starts."""
        return None if self.inside_forward else self.syncs


@dataclasses.dataclass
class DeferredBatch:
    """A batch of several backwards, whose reductions are waited for at its end and not at that of the last backward.

    Attributes:
        why_not_counted: the error message for a loss whose tokens are counted outside of the batch.
        is_open: whether one has begun.
        has_synced: whether one of its backwards was synchronised, and others follow it.
        refusal: the first error with which all data-parallel ranks refused one of its backwards.
    """

    why_not_counted: str
    is_open: bool = False
    has_synced: bool = False
    refusal: MegastrategyError | None = None

    def begin(self) -> None:
        """The backwards from here on are of a new batch."""
        self.is_open, self.has_synced, self.refusal = True, False, None


class FollowsBackwards(Protocol):
    """The engine of a reducer."""

    def on_backward_start(self) -> None:
        """An outermost graph has begun, and has reached no parameter yet."""

    def on_backward_end(self) -> None:
        """A graph has ended. One that is nested in another may tell of its end as well, and does so first."""

    def drop_unfinished(self) -> None:
        """Nothing runs any more of the backwards so far: what they left behind is of one that raised."""


class BackwardWatch:
    """Reports to an engine where backwards begin and end; see [Note: the outermost graph]."""

    def __init__(self, engine: FollowsBackwards) -> None:
        self.engine = weakref.ref(engine)  # whose reducer has this object
        self._outermost = NO_GRAPH_TASK  # torch's number of the graph that is under way, where outputs told of it
        self._ends: list[weakref.ref[Callable[[], None]]] = []  # callbacks of backwards; dead when those have ended

    def forget(self) -> None:
        """A forward starts: the next backward is another."""
        self._outermost = NO_GRAPH_TASK

    def look_at(self, outputs: Any) -> None:
        """Finds the tensors in a forward's outputs that a backward may start from."""
        for output in backward_starts(outputs):
            output.register_hook(self._on_output_grad)

    def knows_outermost(self) -> bool:
        """Whether the end of the backward that is under way is expected already."""
        return self._outermost != NO_GRAPH_TASK

    def expect_end(self) -> None:
        """Reports the end of the backward that is running now (its innermost graph)."""
        self._queue(self._end)

    def _on_output_grad(self, grad: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        engine = self.engine()
        if self._outermost == task or engine is None:
            return
        # Another graph than the last that was seen, and each needs an end. Where no backward is under way, what is left
        # is of one that raised.
        if all(end() is None for end in self._ends):
            engine.drop_unfinished()
        engine.on_backward_start()
        self._outermost = task
        self._queue(self._end_outermost)

    def _queue(self, end: Callable[[], None]) -> None:
        # torch alone keeps the callback, so it is gone when that backward has ended, be it in an exception.
        self._ends = [known for known in self._ends if known() is not None]
        self._ends.append(weakref.ref(end))
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_outermost(self) -> None:
        self._outermost = NO_GRAPH_TASK
        self._end()

    def _end(self) -> None:
        if (engine := self.engine()) is not None:
            engine.on_backward_end()


def backward_starts(outputs: Any) -> Iterator[Tensor]:
    """The tensors in a forward's outputs that a backward may start from; containers and dataclasses are looked into."""
    for leaf in tree_leaves(outputs):
        # A hook on a tensor without a graph raises, or (on a leaf) tells of its own gradient, which comes last.
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            yield leaf
        # torch's pytree takes a dataclass for a leaf. Missed, its backward would seem to end with an inner one.
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from backward_starts([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
