"""Where a backward is, and where one may start."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class BackwardPhase(enum.Enum):
    """Where a reducer is, from the first gradient of a backward to the end of its reductions."""

    IDLE = enum.auto()
    """No backward has reached a parameter. From here a backward goes to the next or the one after it, a step of
    gradients that no backward has reduced to WAITING."""
    ACCUMULATING = enum.auto()
    """A backward that is not synchronised is under way. IDLE when it ends; it stays so if that is by an error."""
    SYNCHRONISING = enum.auto()
    """A synchronised one is: complete buckets are launched. IDLE when it ends, and the rest is launched."""
    WAITING = enum.auto()
    """The ranks agree, and wait for what was launched. IDLE afterwards."""


def backward_starts(outputs: Any) -> Iterator[Tensor]:
    """The tensors in a forward's outputs that a backward may start from; containers and dataclasses are looked into."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from backward_starts([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
