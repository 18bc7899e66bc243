"""The collectives of a single rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from ..layout import Spans
from .interface import Collectives, Handle
from .part_sums import add_parts_


class SingleRankCollectives(Collectives):
    """One rank: nothing is sent or counted, and no thread is started. The tensor itself is its sum over ranks, and the
    result of a gather or broadcast. Only a scale is left to apply."""

    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        if scale != 1.0:  # no pass over the tensor that changes no bit
            tensor.mul_(scale)
        return Done()

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return Done()

    def reduce_scatter(self, tensor: Tensor, scale: float) -> Handle:
        # This rank's part is the whole tensor; with one addend, scaling before or after the sum is the same.
        return self.all_reduce(tensor, scale)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        add_parts_(sums, [tensor], scale)
        return Done()

    def all_gather(self, tensor: Tensor) -> Handle:
        return Done()

    def gather_spans(self, tensor: Tensor, spans: Spans) -> Handle:
        return Done()

    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        return Done()

    def broadcast(self, tensor: Tensor) -> Handle:
        return Done()

    def broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        """Does nothing: they are rank 0's, and are not even copied."""


class Done(Handle):
    """The handle of a collective that ended when it began."""

    def __init__(self) -> None:
        # An empty span, so that a timeline shows the bucket and counts nothing as exposed.
        now_ns = time.perf_counter_ns()
        self.ran_ns = now_ns, now_ns

    def wait(self) -> None:
        """Returns at once."""
