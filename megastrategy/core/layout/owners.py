"""Chooses the rank that steps a parameter whole, where an optimizer needs it whole. No tensors.

An optimizer that looks at rows, norms or matrices (Muon, Shampoo, Adafactor, LAMB) cannot step a flat shard. Its
parameters stay in the flat buckets, whose gradients are reduced as all others are, and each gets an *owner*: before the
step the ranks that hold parts of its reduced gradient send them there, and after the step the owner's weights are what
the gather brings to all. Owners are a pure function of the layout and of who came before; all ranks compute them alone.

[Note: balance]
An owner keeps the state of its parameters and spends the time of their steps; and buckets are gathered one after the
other, each in the time that its fullest rank takes to send. So parameters are given away bucket by bucket, in each the
largest first, to the rank that has the least by then; of several, to the one that holds most of it already, which need
not be sent. No rank then has more than the mean and the largest parameter.

A parameter that is larger than a rank's part of everything (an embedding) is the limit, whoever owns it. It comes
first, so that its owner gets nothing else: in its turn, of the last bucket, all ranks would have their parts already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from .layout import Bucket, BufferLayout, Spans


class Part(NamedTuple):
    """Elements ``[start, end)`` of a buffer, of one parameter."""

    param: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Owners:
    """The owners of those parameters of a layout that have one.

    Args:
        layout: where parameters lie, and which rank holds which part of their reduced gradients.
        rank_of: by parameter, its owner among the ``num_shards`` ranks of an instance.
    """

    layout: BufferLayout
    rank_of: Mapping[int, int]

    def __post_init__(self) -> None:
        assert all(0 <= rank < self.layout.num_shards for rank in self.rank_of.values()), "an owner is a rank"
        assert all(0 <= param < len(self.layout.params) for param in self.rank_of), "it owns a parameter"

    def extended_by(self, params: Collection[int]) -> Owners:
        """The same owners, and some for ``params``; see [Note: balance]."""
        layout, rank_of, loads = self.layout, dict(self.rank_of), self.owned_numels()
        numel = {param: layout.params[param].numel for param in params}
        mean = (sum(loads) + sum(numel.values())) / len(loads)

        def place(param: int) -> tuple[bool, int, int, int]:
            return numel[param] <= mean, layout.slots[param].bucket, -numel[param], param

        for param in sorted(numel, key=place):
            held = {rank: part.numel for rank, part in self.holders(param)}
            least = min(loads)
            rank = min((rank for rank, load in enumerate(loads) if load == least), key=lambda r: (-held.get(r, 0), r))
            rank_of[param] = rank
            loads[rank] += numel[param]
        return Owners(layout, rank_of)

    def owned_numels(self) -> list[int]:
        """The elements that each rank owns."""
        loads = [0] * self.layout.num_shards
        for param, rank in self.rank_of.items():
            loads[rank] += self.layout.params[param].numel
        return loads

    def holders(self, param: int) -> Iterator[tuple[int, Part]]:
        """The ranks that hold a part of its reduced gradient, in the order of addresses, and the part of each."""
        return ((rank, Part(param, start, end)) for rank, start, end in self.layout.holders(param))

    def stepped_spans(self, bucket: Bucket, params: Collection[int]) -> Spans:
        """By rank, the parts of the bucket, from its start, whose weights it steps of ``params``: those that it owns,
        and its shard of the others. Neighbours are one part, with the few elements for alignment between them."""
        spans: list[list[tuple[int, int]]] = [[] for _ in range(self.layout.num_shards)]
        last = -1  # who has the part that was appended last; nobody if a parameter lies between
        for param in bucket.params:
            if param not in params:
                last = -1
                continue
            slot, owner = self.layout.slots[param], self.rank_of.get(param)
            whole = [(owner, Part(param, slot.start, slot.end))] if owner is not None and slot.start < slot.end else []
            for rank, part in self.holders(param) if owner is None else whole:
                start, end = part.start - bucket.start, part.end - bucket.start
                if last == rank:
                    spans[rank][-1] = spans[rank][-1][0], end
                else:
                    spans[rank].append((start, end))
                last = rank
        return spans

    def is_held_by_owner(self, param: int) -> bool:
        """Whether all of its reduced gradient lies at its owner, so that nobody sends any."""
        return all(rank == self.rank_of[param] for rank, _ in self.holders(param))

    def parts_to_send(self, params: Sequence[int], rank: int) -> list[list[Part]]:
        """By owner, the parts of gradients of ``params`` that ``rank`` holds and others own, in the order given."""
        parts: list[list[Part]] = [[] for _ in range(self.layout.num_shards)]
        for param in params:
            owner = self.rank_of[param]
            parts[owner] += [part for holder, part in self.holders(param) if holder == rank != owner]
        return parts

    def parts_to_receive(self, params: Sequence[int], rank: int) -> list[list[Part]]:
        """By holder, the parts of gradients of ``params`` that ``rank`` owns and others hold, in the order given."""
        parts: list[list[Part]] = [[] for _ in range(self.layout.num_shards)]
        for param in (param for param in params if self.rank_of[param] == rank):
            for holder, part in self.holders(param):
                if holder != rank:
                    parts[holder].append(part)
        return parts
