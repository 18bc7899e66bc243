"""The collectives of a rank that is alone."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from ..layout import Spans
from .interface import Collectives, Handle
from .part_sums import add_parts_


class SingleRankCollectives(Collectives):
    """One rank: nothing is sent, no thread is started, and nothing is counted, since there is nobody to keep step with.

    A sum over ranks is the tensor itself, and so is what is gathered or broadcast. Only a scale is left to apply.
    """

    def all_reduce(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        if scale != 1.0:  # else a pass over the tensor that changes no bit
            tensor.mul_(scale)
        return Done()

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return Done()

    def reduce_scatter(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        # This rank's part is all of it; scaled before or after the sum, one addend rounds once.
        return self.all_reduce(tensor, scale)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        add_parts_(sums, [tensor], scale, scale_sum)
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
        """They are rank 0's: not even copied."""


class Done(Handle):
    """The handle of something that ended when it began."""

    def __init__(self) -> None:
        # A span of no length, so that a timeline shows the bucket and counts nothing as exposed.
        now_ns = time.perf_counter_ns()
        self.ran_ns = now_ns, now_ns

    def wait(self) -> None:
        """There is nothing to wait for."""
