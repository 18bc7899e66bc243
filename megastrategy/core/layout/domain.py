"""Which data-parallel ranks hold the same elements of a parameter."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Domain:
    """The ranks that hold the same elements of a parameter, and reduce its gradient together.

    Of most parameters these are all data-parallel ranks. Experts that are divided over ``e`` of them have ``e`` groups
    of ranks, one for each part of the experts. All groups have one plan, so that a layout is the same on every rank.

    Attributes:
        groups: the data-parallel ranks of each group, in order. Every rank is in one group; all have one size.
        num_shards: the number of equal parts in which a group owns a bucket: ``size``, or as many as an instance of the
            distributed optimizer has ranks of the group; 1 if every rank owns all of every bucket.
    """

    groups: tuple[tuple[int, ...], ...]
    num_shards: int

    def __post_init__(self) -> None:
        assert self.size % self.num_shards == 0, "instances are of equal size"
        assert sorted(rank for group in self.groups for rank in group) == list(range(self.size * len(self.groups)))

    @property
    def size(self) -> int:
        """The number of ranks of a group."""
        return len(self.groups[0])

    @property
    def num_instances(self) -> int:
        """The number of ranks that own the same elements."""
        return self.size // self.num_shards

    @property
    def repeat_factor(self) -> float:
        """The factor for a reduced gradient that is reduced again, so that it does not change.

        The sum over the ranks that have it is divided by the number of all data-parallel ranks.
        """
        return self.size * len(self.groups) / self.num_instances

    def divided(self, groups: tuple[tuple[int, ...], ...]) -> Domain:
        """Returns the domain of parameters that are divided over the data-parallel ranks of this one.

        Raises:
            ValueError: if instances of the optimizer have different numbers of ranks of a group.
        """
        if self.num_shards == 1:
            return Domain(groups, 1)
        num_shards, rest = divmod(self.num_shards, len(groups))
        instances = [[rank // self.num_shards for rank in group] for group in groups]
        if rest or any(held.count(number) != num_shards for held in instances for number in held):
            raise ValueError(
                f"num_distributed_optimizer_instances={self.num_instances}: an instance has {self.num_shards} ranks in "
                f"a row, and a multiple of the {len(groups)} ranks that experts are divided over is expected, "
                "neighbours in expert_mesh"
            )
        return Domain(groups, num_shards)

    def ranks_with(self, dp_rank: int) -> tuple[int, ...]:
        """Returns the ranks of the group that ``dp_rank`` is in."""
        if len(self.groups) == 1:
            return self.groups[0]
        return next(group for group in self.groups if dp_rank in group)

    def shard_of(self, dp_rank: int) -> int:
        """Returns the number of the shard that a data-parallel rank owns."""
        place = dp_rank if len(self.groups) == 1 else self.ranks_with(dp_rank).index(dp_rank)
        # Modulo: ranks at the same place of their instances own the same part.
        return place % self.num_shards
