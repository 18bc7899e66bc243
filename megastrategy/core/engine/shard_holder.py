"""Interface of an optimizer's shards, as the engine needs it."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ShardHolder(ABC):
    """Holds tensors that are sharded by the layout.

    Attributes:
        num_steps_begun: the number of steps that began to change weights.
        needs_ranks: whether this rank has only a part of some state, and other ranks have the rest.
    """

    num_steps_begun = 0
    needs_ranks = False

    @abstractmethod
    def num_kept(self) -> dict[int, int] | None:
        """Returns how many numbers are kept per element, by parameter; None if that is unknown before a first step."""

    @abstractmethod
    def has_state(self) -> bool:
        """Whether it has anything that shards of the present weights, made anew, would not have."""

    @abstractmethod
    def release_shards(self) -> None:
        """Drops all views of the old buffers, whose memory is needed. :meth:`make_shards_again` follows."""

    @abstractmethod
    def make_shards_again(self) -> None:
        """Makes the same shards in the present layout."""
