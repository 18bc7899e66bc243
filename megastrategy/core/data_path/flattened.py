"""Buckets without persistent memory: Megatron-LM's fallback, for code that needs autograd's own ``.grad``."""

from __future__ import annotations

import torch
from torch import Tensor

from .bucket import Bucket, State, get_grad, widen_grads
from .param_buffers import slice_view


class FlattenedBucket(Bucket):
    """A bucket whose ``.grad`` is autograd's own, and whose memory exists while it is reduced: after backward."""

    def accumulate(self) -> None:
        """Ends a microbatch that is not reduced: autograd adds to its own tensors."""
        self.missing &= self.waiting
        self.waiting.clear()
        widen_grads(self.params, self.specs)
        self.has_unprepared = False
        self.state = State.SEALED

    def _seal(self) -> None:
        first = self.plan.start
        # Unused parameters and padding are sent as zeros.
        self.grads = torch.zeros(self.plan.end - first, dtype=self.grads.dtype, device=self.grads.device)
        starts = [self._layout.slots[index].start - first for index in self.plan.params]
        views = zip(self.specs, starts, strict=True)
        self._set_views([slice_view(self.grads, start, s.shape, s.stride, s.numel) for s, start in views])
        self.used = self.collect()
        self.has_unprepared = False
        self.state = State.SEALED

    def publish(self, used: bytes) -> None:
        """Copies the means into ``.grad`` of the parameters that any rank has used, and drops the others' (those of a
        replica that takes no part yet)."""
        self.used = used
        self.missing = set(self.awaited)
        for place, flag in enumerate(used):
            if flag:
                self._copy_back(place)
            else:
                self.params[place].grad = None
        self._free()

    def _copy_back(self, place: int) -> None:
        param = self.params[place]
        grad = param.grad
        # A mean over ranks is dense, and cut like the parameter.
        if grad is None or grad.layout != param.layout or not self._parts.is_cut_alike(param, grad):
            grad = param.grad = torch.empty_like(param, dtype=self.grads.dtype)
        grad.copy_(self._faces[place])

    def _free(self) -> None:
        self.grads = self.grads.new_empty(0)
        self._set_views([])

    def final_grads(self) -> list[Tensor]:
        """Returns the gradients that a step may use, without those of frozen parameters."""
        grads = [get_grad(param) for param in self.params if param.requires_grad]
        return [self._parts.local_view(grad) for grad in grads if grad is not None]

    def drop(self) -> None:
        super().drop()
        self._free()
