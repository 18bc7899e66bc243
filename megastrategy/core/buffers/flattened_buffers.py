"""Gradients without buffers while they accumulate: Megatron-LM's fallback, for code that needs autograd's own
``.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..module import LocalParts
from .grad_buffers import GradBuffers, copy_grad_


class FlattenedGradBuffers(GradBuffers):
    """Megatron-LM's fallback without persistent buffers: ``.grad`` is autograd's own, and a bucket exists
    while it is reduced."""

    def __init__(self, dp_rank: int, device: torch.device, parts: LocalParts) -> None:
        super().__init__(dp_rank, device, parts)
        # By bucket, from its seal to its publication. All are sent at the end, so they may be as large as the model.
        self._flats: dict[int, Tensor] = {}

    def _place(self, first: int, grads: Sequence[Tensor | None]) -> None:
        for index, grad in enumerate(grads, first):
            self.params[index].grad, self.has_grad[index] = grad, grad is not None

    def open(self) -> None:
        for index, param in enumerate(self.params):
            self.has_grad[index] = param.grad is not None

    def adopt_grad(self, param: int) -> None:
        self._check_param(param)

    def seal(self, bucket: int) -> None:
        place = self.layout.buckets[bucket]
        # Unused parameters and padding are sent, too, as zeros.
        flat = torch.zeros(place.numel, dtype=self.layout.buffers[place.buffer].grad_dtype, device=self._device)
        grads = self.local_parts.local_grads([self.params[index] for index in place.params])
        for index, grad in zip(place.params, grads, strict=True):
            self.has_grad[index] = grad is not None
            if grad is not None:
                copy_grad_(self._view_in(flat, index), grad)
        self._flats[bucket] = flat

    def piece_to_reduce(self, bucket: int, piece: int) -> tuple[Tensor, Tensor | None]:
        return self._flats[bucket], None

    def publish(self, bucket: int) -> None:
        flat, is_cut_alike = self._flats.pop(bucket), self.local_parts.is_cut_alike
        for index in self.layout.buckets[bucket].params:
            param = self.params[index]
            # No rank used it: .grad stays None, so optimizers skip it; zeros would decay its momentum.
            if not self.has_grad[index]:
                continue
            # A mean over ranks is dense, and cut like the parameter.
            if param.grad is None or param.grad.layout != param.layout or not is_cut_alike(param, param.grad):
                param.grad = torch.empty_like(param, dtype=flat.dtype)
            param.grad.copy_(self.local_parts.as_grad(param, self._view_in(flat, index)))

    def _view_in(self, flat: Tensor, index: int) -> Tensor:
        spec, slot = self.layout.params[index], self.layout.slots[index]
        start = slot.start - self.layout.buckets[slot.bucket].start
        return flat[start : start + spec.numel].as_strided(spec.shape, spec.stride)
