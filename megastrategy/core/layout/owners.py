"""Chooses the rank that steps a parameter whole, for optimizers that need whole parameters. No tensors.

An optimizer that computes with rows, norms or matrices (Muon, Shampoo, Adafactor, LAMB) cannot step a flat shard. Its
parameters stay in the flat buckets, whose gradients are reduced as all others are, and each gets an *owner*. Before
the step the ranks send their parts of its reduced gradient to the owner, and after the step the gather sends the
owner's weights to all ranks. If every rank steps a parameter, all get its gradient, and each sends its shard of the new
weights, as if the parameter were flat. Owners are a pure function of the layout and of the owners chosen before, so
every rank computes them by itself.

[Note: how owners are chosen]
An owner stores the state of its parameters and spends the time of their steps. Buckets are gathered one after
the other, and each gather takes as long as the rank that sends most. So parameters are assigned bucket by
bucket, the largest of each bucket first, to the rank that has the fewest elements by then; among several, to the
one that already has most of the parameter's gradient, which need not be sent. No rank then has more than the
mean plus the largest parameter.

A parameter that is larger than a rank's mean share (an embedding) is the limit, whichever rank owns it. It is assigned
first, so that its owner gets nothing else: in its turn, in the last bucket, all ranks would have their shares already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from .layout import Bucket, BufferLayout, Part, Spans

EVERY_RANK = -1
"""In place of an owner: every rank steps the parameter."""


@dataclasses.dataclass(frozen=True)
class Owners:
    """The owners of the layout's whole parameters; ``rank_of``: by parameter, its owner among the
    ranks of an instance, or :data:`EVERY_RANK`."""

    layout: BufferLayout
    rank_of: Mapping[int, int]

    def __post_init__(self) -> None:
        ranks = range(EVERY_RANK, self.layout.num_shards)
        assert all(rank in ranks for rank in self.rank_of.values()), "an owner is a rank"
        assert all(0 <= param < len(self.layout.params) for param in self.rank_of), "it owns a parameter"

    def extended_by(self, params: Collection[int]) -> Owners:
        """Returns the same owners, with owners for ``params``; see [Note: how owners are chosen]."""
        layout = self.layout
        rank_of = dict(self.rank_of)
        loads = self.owned_numels()
        numel = {param: layout.params[param].numel for param in params}
        mean = (sum(loads) + sum(numel.values())) / len(loads)

        def place(param: int) -> tuple[bool, int, int, int]:
            return numel[param] <= mean, layout.slots[param].bucket, -numel[param], param

        for param in sorted(numel, key=place):
            held = {rank: part.numel for rank, part in self.layout.holders(param)}
            least = min(loads)
            rank = min((rank for rank, load in enumerate(loads) if load == least), key=lambda r: (-held.get(r, 0), r))
            rank_of[param] = rank
            loads[rank] += numel[param]
        return Owners(layout, rank_of)

    def owned_numels(self) -> list[int]:
        """Returns the number of elements that each rank owns alone."""
        loads = [0] * self.layout.num_shards
        for param, rank in self.rank_of.items():
            if rank != EVERY_RANK:
                loads[rank] += self.layout.params[param].numel
        return loads

    def stepped_spans(self, bucket: Bucket, params: Collection[int]) -> Spans:
        """Returns, by rank, the parts of the bucket (offsets from its start) whose weights it steps, of
        ``params``: the parameters that it owns alone, and its shard of the others. Adjacent ones are one part, with
        the padding between them."""
        spans: list[list[tuple[int, int]]] = [[] for _ in range(bucket.domain.num_shards)]
        last = -1  # the rank of the part that was appended last; -1 if a parameter is between
        for param in bucket.params:
            if param not in params:
                last = -1
                continue
            slot = self.layout.slots[param]
            owner = self.rank_of.get(param, EVERY_RANK)
            whole = [(owner, Part(param, slot.start, slot.end))] if slot.start < slot.end else []
            for rank, part in self.layout.holders(param) if owner == EVERY_RANK else whole:
                start = part.start - bucket.start
                end = part.end - bucket.start
                if last == rank:
                    spans[rank][-1] = spans[rank][-1][0], end
                else:
                    spans[rank].append((start, end))
                last = rank
        return spans
