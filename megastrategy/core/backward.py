"""The phases of a backward, and the tensors that one may start from."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


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


def backward_starts(outputs: Any) -> Iterator[Tensor]:
    """The tensors in a forward's outputs that a backward may start from; containers and dataclasses are looked into."""
    for leaf in tree_leaves(outputs):
        # A hook on a tensor without a graph raises, or (on a leaf) tells of its own gradient, which comes last.
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            yield leaf
        # torch's pytree takes a dataclass for a leaf. Missed, its backward would seem to end with a checkpoint's inner
        # one.
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from backward_starts([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
