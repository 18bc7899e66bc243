"""The reducer of a stage, whose backwards run inside of a forward; see staged_backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .reducer import Reducer
from .stages import StageParts


class StagedReducer(Reducer):
    """Launches reductions in the last backward of a batch, and waits for them when the schedule has ended."""

    _defers = False
    _is_last = False  # nothing of this batch comes after what is finished now

    @property
    def would_sync(self) -> bool:
        """Whether a backward would be synchronised that no forward has decided about."""
        return self._should_sync(None)

    def begin_deferring(self) -> None:
        """The backwards that come launch reductions, and leave it to :meth:`finish_deferred` to wait for them."""
        self._defers = True

    def decide_next_backward(self, outputs: Any, *, sync: bool) -> None:
        """A backward is about to start from ``outputs``, to be synchronised or not."""
        self._forward_decision = sync
        self._backwards.forget()
        self.watch(outputs)

    def finish_deferred(self) -> None:
        """As :meth:`finish_grad_sync`, also where no backward came here: those that wait for this rank get zeros."""
        self._defers, self._is_last = False, True
        self._has_local_grads |= bool(self._params)
        try:
            self.finish_grad_sync()
        finally:
            self._is_last = False

    def scale_reduced(self, factor: Tensor) -> None:
        """Multiplies the reduced gradients, as far as this rank has them, by one number."""
        grads = list[Tensor]()
        for index, has_grad in enumerate(self.buffers.has_grad):
            owned = self.layout.owned_range(index, self._collectives.rank)
            if has_grad and self.buffers.is_sharded(index):
                grads += [] if owned is None else [self.buffers.reduced(self._bucket_of[index], *owned)]
            elif has_grad and (grad := self._params[index].grad) is not None:
                grads.append(grad.detach())
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))

    def _end_synchronised(self) -> None:
        # Pooled gradients are reduced after every microbatch, and nothing but the last reduction may be left.
        if not (self._defers and self._ends_window):
            super()._end_synchronised()

    def _agree_on_copies(self) -> None:
        if self._is_last:
            self._stage.agree_on_copies(self._params, self.buffers.has_grad)

    def _add_up_copies(self) -> None:
        if self._is_last:
            self._stage.add_up_copies(self._params, self.buffers.own_bucket_of)

    @property
    def _stage(self) -> StageParts:
        parts = self.buffers.local_parts
        assert isinstance(parts, StageParts)
        return parts
