"""Interface of an object that holds sharded tensors and can move them to another layout."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

Contents = dict[int, dict[str, Any]]
"""State by parameter (index in the layout) and name."""


@dataclasses.dataclass(frozen=True)
class PerElement:
    """Describes a tensor with one number for each element of a parameter, which is sharded as the parameter is."""

    dtype: torch.dtype


class ShardHolder(ABC):
    """Holds tensors that are sharded by the layout, and can exchange them for those of another layout.

    Attributes:
        num_steps_begun: the number of steps that began to change weights.
        needs_ranks: whether this rank has only a part of some state, and other ranks have the rest.
    """

    num_steps_begun = 0
    needs_ranks = False

    @abstractmethod
    def describe(self) -> Contents | None:
        """Returns this rank's values by parameter and name; None if they cannot be moved.

        A value is :class:`PerElement` for a sharded tensor, otherwise picklable and the same on all owners.
        """

    def num_kept(self) -> dict[int, int] | None:
        """Returns how many numbers are kept per element, by parameter; None if that is unknown before a first step."""
        return {}

    @abstractmethod
    def part(self, param: int, name: str) -> Tensor | None:
        """Returns this rank's elements of a :class:`PerElement`, flat and in memory order; None if it has none."""

    def copy_of(self, name: str, part: Tensor) -> Tensor:
        """Returns a copy of a gathered part that will be this rank's, in the kind of memory that the holder uses."""
        return part.clone()

    def release(self) -> None:  # noqa: B027 - nothing to do where nothing is kept
        """Drops all views of the old buffers, whose memory is needed. :meth:`adopt` follows."""

    @abstractmethod
    def adopt(self, contents: Contents) -> None:
        """Replaces the values by those for the present layout.

        ``contents`` has the described parameters that this rank owns in part: the part, in memory of its own, or the
        value that is the same on all owners.
        """
