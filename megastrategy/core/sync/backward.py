"""The phases of a backward, and its beginning and end.

[Note: when a backward has ended]
torch runs a callback when the graph ends in which it was queued. A re-entrant checkpoint runs an inner graph, which
reaches its parameters, so a callback that their hooks queue would run too early to send the remaining buckets. The
outputs of a forward are in the outermost graph: the first gradient that reaches one of them queues the callback there.
If no outputs are known (a loss of parameters only), the graph that reaches a parameter first is used.
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
    """No backward has reached a parameter. A first gradient leads to ACCUMULATING or SYNCHRONISING, and a step whose
    gradients are not reduced yet leads to WAITING."""
    ACCUMULATING = enum.auto()
    """A backward that is not synchronised is running. IDLE when it ends. After an error the phase stays until the next
    forward, or the next backward, drops the gradients."""
    SYNCHRONISING = enum.auto()
    """A synchronised backward is running, and complete buckets are launched. IDLE when it ends, and the remaining
    buckets are launched. After an error as ACCUMULATING."""
    WAITING = enum.auto()
    """The ranks agree, and wait for the launched buckets. IDLE afterwards, also after an error."""


@dataclasses.dataclass
class Preparation:
    """The forwards of the wrapped model since the last synchronised backward; see reducer's
    [Note: which backward synchronises].

    Attributes:
        syncs: whether a forward trained and ended outside ``no_sync``.
        accumulates: whether a forward trained under ``no_sync``.
        inside_forward: whether a forward is running that runs its backwards itself (Lightning's manual optimization).
        graph: torch's number of the backward that the last forward ran in.
        spent_in: torch's number of a backward in which a synchronised one has ended; the rest of it is synchronised
            as well.
    """

    syncs: bool = False
    accumulates: bool = False
    inside_forward: bool = False
    graph: int = NO_GRAPH_TASK
    spent_in: int = NO_GRAPH_TASK

    def add(self, *, syncs: bool) -> None:
        """Records the end of a forward that trains."""
        self.graph = torch._C._current_graph_task_id()
        if self.spent_in not in (NO_GRAPH_TASK, self.graph):  # that backward is over, as with gradient caching
            self.clear()
        if syncs:
            self.syncs = True
        else:
            self.accumulates = True

    def replace(self, *, syncs: bool) -> None:
        """Sets the decision for the next backward, whatever the forwards before it."""
        self.syncs, self.accumulates = syncs, not syncs

    def end(self, *, inside: bool) -> None:
        """Records the end of a synchronised backward; ``inside``: another backward around it continues."""
        if inside:
            self.spent_in = self.graph
        else:
            self.clear()

    def clear(self) -> None:
        """Forgets all forwards."""
        self.syncs = self.accumulates = False
        self.spent_in = NO_GRAPH_TASK

    def __bool__(self) -> bool:
        return self.syncs or self.accumulates or self.inside_forward

    @property
    def decision(self) -> bool | None:
        """Whether the next backward is synchronised; None if that is decided when it starts."""
        return None if self.inside_forward else self.syncs


@dataclasses.dataclass
class DeferredBatch:
    """A batch of several backwards whose reductions are waited for at its end, not at the end of a backward.

    Attributes:
        why_not_counted: the error message for a loss whose tokens are counted outside of a batch.
        is_open: whether a batch has begun.
        has_synced: whether one of its backwards was synchronised, and more may follow.
        refusal: the first error with which all data-parallel ranks rejected one of its backwards.
    """

    why_not_counted: str
    is_open: bool = False
    has_synced: bool = False
    refusal: MegastrategyError | None = None

    def begin(self) -> None:
        """Begins a new batch."""
        self.is_open, self.has_synced, self.refusal = True, False, None


class BackwardListener(Protocol):
    """The methods of the engine that a :class:`BackwardWatch` calls."""

    def on_backward_start(self) -> None:
        """Called when an outermost graph has begun, before it reaches a parameter."""

    def on_backward_end(self) -> None:
        """Called when a graph has ended; first for a nested graph, if it has queued the callback too."""

    def drop_unfinished(self) -> None:
        """Called when no backward is running any more and one of them has raised."""


class BackwardWatch:
    """Reports to the engine where backwards begin and end; see [Note: when a backward has ended]."""

    def __init__(self, engine: BackwardListener) -> None:
        self.engine = weakref.ref(engine)  # weak: its reducer refers to this object
        self._outermost = NO_GRAPH_TASK  # torch's number of the running graph, if it began at known outputs
        self._ends: list[weakref.ref[Callable[[], None]]] = []  # callbacks of backwards, alive while these run

    def reset(self) -> None:
        """Called before a forward: the next backward is another one."""
        self._outermost = NO_GRAPH_TASK

    def watch(self, outputs: Any) -> None:
        """Registers hooks on the tensors in a forward's outputs that a backward may start from."""
        for output in backward_starts(outputs):
            output.register_hook(self._on_output_grad)

    @property
    def expects_end(self) -> bool:
        """Whether a callback for the end of the running backward is queued already."""
        return self._outermost != NO_GRAPH_TASK

    def expect_end(self) -> None:
        """Reports the end of the innermost graph that is running now."""
        self._queue(self._end)

    def _on_output_grad(self, grad: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        engine = self.engine()
        if self._outermost == task or engine is None:
            return
        # A graph that is not known yet needs a callback of its own. If no earlier backward is running, one has raised.
        if all(end() is None for end in self._ends):
            engine.drop_unfinished()
        engine.on_backward_start()
        self._outermost = task
        self._queue(self._end_outermost)

    def _queue(self, end: Callable[[], None]) -> None:
        # Only torch keeps the callback alive, so it is gone when that backward has ended, also in an exception.
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
    """Yields the tensors in a forward's outputs, in containers and dataclasses too, that a backward may start from."""
    for leaf in tree_leaves(outputs):
        # A hook on a tensor without a graph raises; on a leaf it runs for the leaf's own gradient, which comes last.
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            yield leaf
        # For torch's pytree a dataclass is a leaf. Without its tensors a backward would seem to end with the inner
        # graph of a checkpoint.
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from backward_starts([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
