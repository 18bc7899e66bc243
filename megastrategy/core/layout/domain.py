"""Which data-parallel ranks hold the same elements of a parameter."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Domain:
    """The ranks that hold the same elements of a parameter, and reduce its gradient together.

    Of most parameters these are all data-parallel ranks. Experts that are divided over ``e`` of them have domains of a
    ``1/e``-th of the ranks, one for each part of the experts; all of these have one plan.

    Attributes:
        size: the number of ranks.
        num_shards: the number of equal parts in which a bucket is owned: ``size``, or as many as an instance of the
            distributed optimizer has ranks in the domain; 1 if every rank owns all of every bucket.
        places: by data-parallel rank, its number among the ranks of its domain.
    """

    size: int
    num_shards: int
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.size % self.num_shards == 0, "instances are of equal size"

    @classmethod
    def of_all(cls, dp_size: int, num_shards: int) -> Domain:
        return cls(dp_size, num_shards, tuple(range(dp_size)))

    @property
    def num_instances(self) -> int:
        """The number of ranks that own the same elements."""
        return self.size // self.num_shards

    def shard_of(self, dp_rank: int) -> int:
        """The number of the shard that a data-parallel rank owns."""
        # Modulo: ranks at the same place of their instances own the same part.
        return self.places[dp_rank] % self.num_shards
