"""The flat tensors of the plan: gradients, and weights where the optimizer is sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..layout import Bucket as BucketPlan
from ..layout import BufferLayout
from ..module import LocalParts
from .param_buffers import ParamBuffers, slice_view
from .staging import StagingPool


class Memory:
    """Gradients and weights at the addresses of the plan.

    Attributes:
        keeps_grads: whether gradients accumulate in this memory.
        grads: by buffer, 1-D gradients in the gradient dtype; empty without ``keeps_grads``. The padding between
            parameters is zero, and stays zero.
        grad_views: by parameter, its place in ``grads``, with the shape and strides of this rank's part.
        sums: by buffer, memory for this rank's reduced shards, where these have another dtype than the gradients or
            are not computed in place; None elsewhere.
        weights: the parameters, which this object moves into contiguous memory; None without shards.
        pool: the staging buffers of pooled gradients; None for others.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Sequence[Parameter],
        device: torch.device,
        parts: LocalParts,
        *,
        keeps_grads: bool,
    ) -> None:
        self.layout = layout
        self.device = device
        self.keeps_grads = keeps_grads
        self.pool = StagingPool(device) if layout.is_pooled else None
        self.grads: list[Tensor] = []
        self.grad_views: list[Tensor] = []
        self.sums: list[Tensor | None] = []
        self._add_grads(layout)
        self.weights: ParamBuffers | None = None
        if layout.num_shards > 1:
            self.weights = ParamBuffers(layout, params, device, parts)

    def extend(self, layout: BufferLayout, params: Sequence[Parameter]) -> None:
        """Adds memory for the parameters that ``layout`` has beyond the present ones."""
        self.layout = layout
        self._add_grads(layout)
        if self.weights is not None:
            self.weights.extend(layout, params)

    def _add_grads(self, layout: BufferLayout) -> None:
        for buffer in layout.buffers[len(self.grads) :]:
            numel = buffer.numel if self.keeps_grads else 0
            self.grads.append(torch.zeros(numel, dtype=buffer.grad_dtype, device=self.device))
            sums = None
            if buffer.has_separate_sums:
                sums = torch.zeros(buffer.shard_numel, dtype=buffer.sum_dtype, device=self.device)
            self.sums.append(sums)
        if not self.keeps_grads:
            return
        for index in range(len(self.grad_views), len(layout.params)):
            spec = layout.params[index]
            slot = layout.slots[index]
            self.grad_views.append(slice_view(self.grads[slot.buffer], slot.start, spec.shape, spec.stride, spec.numel))

    def grad_bucket(self, bucket: BucketPlan) -> Tensor:
        """Returns the gradients of a bucket: a 1-D view, empty without ``keeps_grads``."""
        return self.grads[bucket.buffer][bucket.start : bucket.end]

    def reduced_shard(self, bucket: BucketPlan, dp_rank: int) -> Tensor:
        """Returns the memory of this rank's reduced shard of a bucket: a 1-D view."""
        sums = self.sums[bucket.buffer]
        start, end = self.layout.shard_range(bucket, dp_rank)
        if sums is None:
            return self.grads[bucket.buffer][start:end]
        first = bucket.start // bucket.domain.num_shards  # the shards of all buckets, one after the other
        return sums[first : first + bucket.shard_numel]
