"""The reducer of a rank's stages, whose backwards run inside of a forward; see staged_backwards.

[Note: several stages a rank]
Under an interleaved schedule a rank's last stage has its last backward while the others have some left. Parameters are
laid out from the last layer to the first, so the first buckets are that stage's, and are launched then. The backwards
that follow accumulate beside buckets that are on the wire, and reach no parameter of those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import LossTokensError
from .layout import BufferLayout
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
        self._defers, self._has_synced = True, False

    def end_deferring(self) -> None:
        """The batch broke off: what its backwards have left behind is dropped before the next."""
        self._defers = False

    def drop_unfinished(self) -> None:
        if not self._defers:  # else reductions that are on their way are those of this batch
            super().drop_unfinished()

    def decide_next_backward(self, outputs: Any, *, sync: bool) -> None:
        """A backward is about to start from ``outputs``, to be synchronised or not."""
        self._prepared.replace(syncs=sync)
        self._backwards.forget()
        self.watch(outputs)

    def finish_deferred(self) -> BufferLayout | None:
        """As :meth:`finish_grad_sync`, also where no backward came here: those that wait for this rank get zeros."""
        self._defers, self._is_last = False, True
        self._has_local_grads |= bool(self._params)
        try:
            return self.finish_grad_sync()
        finally:
            self._is_last = False

    def scale_reduced(self, factor: Tensor) -> None:
        """Multiplies the reduced gradients, as far as this rank has them, by one number."""
        grads = self.buffers.own_grads(range(len(self._params)))
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))

    def count_tokens(self, count: float) -> None:
        raise LossTokensError(
            "loss_tokens(n) weighs each backward, and the backwards of a pipeline's microbatches are inside of its "
            "forward. Let the loss function weigh its tokens: their sum over a number that all microbatches share"
        )

    def _end_synchronised(self) -> BufferLayout | None:
        self._has_synced = self._defers and not self.buffers.reduces_every_backward
        # Pooled gradients are reduced after every microbatch, and nothing but the last reduction may be left.
        return None if self._defers and self._ends_window else super()._end_synchronised()

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
