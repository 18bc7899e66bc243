"""The interface between a move to another layout and an object that keeps tensors which the layout cuts."""

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
    """Stands for a tensor with one number for each element of a parameter, of which a rank keeps its own part."""

    dtype: torch.dtype


class ShardHolder(ABC):
    """Keeps tensors that the layout cuts, and can exchange them for those of another layout.

    Attributes:
        num_steps_begun: the steps so far that began to change weights.
    """

    num_steps_begun = 0
    needs_ranks = False
    """Whether it has a part of some state only, and the other ranks the rest."""
    is_used_elsewhere = False
    """Whether user code refers to the optimizer itself."""
    has_state_of_main_params = False
    """Whether state is fp32 beside 16-bit weights, to whose dtype torch's own optimizer casts it."""

    @abstractmethod
    def describe(self) -> Contents | None:
        """Says what this rank keeps of each parameter; None if it cannot be moved.

        A value is :class:`PerElement`, or picklable and of the parameter as a whole.
        """

    def num_kept(self) -> dict[int, int] | None:
        """The numbers that are kept for each element, by parameter; None if they are unknown before the first step."""
        return {}

    def give_back(self) -> None:  # noqa: B027 - nothing to do where no state is kept
        """The model is closed: the optimizer's state is whole on every rank. Collective if it is sharded."""

    @abstractmethod
    def part(self, param: int, name: str) -> Tensor | None:
        """The elements of a :class:`PerElement` that this rank owns (flat, in memory order), if it keeps them."""

    def copy_of(self, name: str, part: Tensor) -> Tensor:
        """A copy of what was gathered under a name and will be this rank's, in the memory in which that is kept."""
        return part.clone()

    def release(self) -> None:  # noqa: B027 - nothing to do where nothing is kept
        """Lets go of all views of the old buffers, whose memory is needed: everybody has what it will :meth:`take`."""

    @abstractmethod
    def take(self, contents: Contents) -> None:
        """Takes over what the rank keeps in the layout that the model has now: of each parameter that any rank
        described and of which this one owns a part, that part (in memory of its own) or the whole value."""
