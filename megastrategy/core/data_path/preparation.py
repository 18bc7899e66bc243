"""Which backward comes next: what the forwards before it have decided, and where it may start."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import MegastrategyError
from .reduced_grad import NO_GRAPH_TASK


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
        self.syncs = syncs
        self.accumulates = not syncs

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
        self.is_open = True
        self.has_synced = False
        self.refusal = None


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
