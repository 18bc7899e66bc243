"""The collectives of a rank whose peers do not exist: torch's fake backend, which runs a program as one rank of N."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .interface import Handle
from .single_rank import Done, SingleRankCollectives


class FakeCollectives(SingleRankCollectives):
    """One rank of many, the only one that runs: its peers are assumed to have, to do and to send the same as this one.

    Shapes, memory and the order of calls are those of a real run; values are not. A sum has ``size`` equal addends, and
    a gather repeats this rank's part.
    """

    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        return super().all_reduce(tensor, scale * self.size)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        own = tensor.chunk(self.size)[self.rank]
        return super().reduce_scatter_into(sums, own, scale * self.size)

    def all_gather(self, tensor: Tensor) -> Handle:
        # Not left as it is: memory that no peer fills may be uninitialised, and contain NaN.
        parts = tensor.view(self.size, -1)
        parts.copy_(parts[self.rank].clone())
        return Done()

    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        received.zero_()  # as in all_gather, where peers' parts are this one's: here these have other sizes
        return Done()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.size

    def max_of_bytes(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)
