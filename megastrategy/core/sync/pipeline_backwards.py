"""Gradients of a batch whose backwards run inside of the model's forward, microbatch by microbatch.

[Note: backwards inside of a forward]
A schedule runs all forwards and backwards of a batch, so they are over when the module's forward returns, and the loss
that it returns has nothing left to compute. Three things follow. Gradients of the batch begin at zero when the forward
begins, and a ``zero_grad`` between it and ``loss.backward()``, where many loops have it, belongs before the forward.
Whether gradients of the last batch were meant to be added to is known when ``loss.backward()`` has come without it.
``loss.backward()`` multiplies the gradients by what the loss was multiplied with. And reductions are launched by the
last backward of each stage, but waited for when the schedule has ended: a stage that waited in its last backward for
ranks of other stages would keep the gradient of its input, which those wait for.

[Note: several stages a rank]
Under an interleaved schedule a rank's last stage has its last backward while the others have some left. Parameters are
laid out from the last layer to the first, so the first buckets are that stage's, and are launched then. The backwards
that follow accumulate beside buckets that are on the wire, and reach no parameter of those.
"""

from __future__ import annotations

import enum
import struct
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import devices
from ..buffers import GradBuffers
from ..errors import LossTokensError, MegastrategyError, MicrobatchMismatchError, NonFiniteGradError, StageError
from ..layout import BufferLayout
from ..module import FollowsStages, LocalParts, StageParts
from .loss_tokens import LossTokens
from .reducer import Reducer

_FACTOR = struct.Struct("<d")
"""The factor of the correction to the mean over tokens; 0.0 where there is none."""

_REFUSALS = (NonFiniteGradError, MicrobatchMismatchError, LossTokensError)
"""The errors that all data-parallel ranks of a stage raise alike, when nothing is on its way between stages."""


class _State(enum.Enum):
    """Tells how far the gradients of a batch have come."""

    NONE = enum.auto()
    """There are none, or they were dropped."""
    MADE = enum.auto()
    """The forward has returned, and the backward of its loss has not come yet."""
    READY = enum.auto()
    """It has come; a step may use them."""


class _Engine(Protocol):
    local_parts: LocalParts
    grad_buffers: GradBuffers
    reducer: Reducer

    @property
    def num_steps(self) -> int:
        """Steps of the model's optimizers so far."""

    def move_to(self, layout: BufferLayout | None) -> None:
        """Moves everything to another layout, or nothing for None. Collective."""


class StagedBackwards(FollowsStages):
    """Tells the engine of the backwards that a :class:`~.stages.StagedModule` runs."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = weakref.ref(engine)  # which has this object, as the user's module does
        self._state = _State.NONE
        self._num_steps = 0  # when the gradients became ready
        self._are_left = False  # those of an earlier batch were ready when the forward began
        self._made: list[Tensor | None] = []  # .grad by parameter, between forward and backward

    @property
    def _present(self) -> _Engine:
        engine = self._engine()
        assert engine is not None, "it detaches itself from the module"
        return engine

    @property
    def _reducer(self) -> StagedReducer:
        reducer = self._present.reducer
        assert isinstance(reducer, StagedReducer)
        return reducer

    def begin(self) -> None:
        engine = self._present
        if not self._reducer.would_sync:
            raise self._accumulates("it was called under no_sync()")
        self._are_left |= self._state is _State.READY
        self._made = []
        engine.grad_buffers.clear(range(len(engine.grad_buffers.params)))
        self._reducer.begin_deferring()

    @staticmethod
    def _accumulates(why: str) -> StageError:
        return StageError(
            f"gradients of several batches do not accumulate in a pipeline, whose forward begins from zero: {why}. Let "
            "one batch have more microbatches, or drop the gradients first (optimizer.zero_grad()). A loss of two "
            "forwards is computed in one: the second's layers behind the first's"
        )

    def before_backward(self, outputs: Any, *, is_last: bool, has_loss: bool) -> None:
        self._reducer.decide_next_backward(outputs, sync=is_last, has_loss=has_loss)

    def finish(self, problem: str = "") -> None:
        engine = self._present
        refusal: MegastrategyError | None = StageError(problem) if problem else None
        try:
            engine.move_to(self._reducer.finish_deferred())
        except _REFUSALS as error:
            refusal = refusal or error
        self._state = _State.NONE
        try:
            self._agree(engine.local_parts, refusal)
        except MegastrategyError:
            engine.grad_buffers.clear(range(len(engine.grad_buffers.params)))
            raise
        self._state = _State.MADE
        self._made = [param.grad for param in engine.grad_buffers.params]

    def _agree(self, parts: LocalParts, refusal: MegastrategyError | None) -> None:
        if parts.stage_ranks is not None:
            # On the hosts: what the device has launched is not waited for. Only the last stage has losses to count.
            tokens = self._reducer.tokens
            [refused, *factor] = parts.stage_ranks.host.max_of_bytes(
                [refusal is not None, *_FACTOR.pack(tokens.factor)]
            )
            if not refused:
                [of_last_stage] = _FACTOR.unpack(bytes(factor))
                if of_last_stage and not tokens.factor:
                    tokens.scale(of_last_stage)
                return
            told = None if refusal is None else (type(refusal), str(refusal))
            assert isinstance(parts, StageParts)
            for rank, theirs in enumerate(parts.stage_ranks.all_gather_objects(told)):
                if theirs is not None:
                    kind, text = theirs
                    raise kind(f"stage {parts.stage_of(rank)}: {text}") from refusal
        if refusal is not None:
            raise refusal

    def abandon(self) -> None:
        self._state = _State.NONE
        self._reducer.end_deferring()

    def use(self, grad: Tensor) -> None:
        engine = self._present
        if self._state is not _State.MADE:
            raise StageError(
                "backward was called twice for the loss of one forward of a pipeline, or after the next forward: its "
                "gradients were computed in the forward, once"
            )
        made, self._made = self._made, []
        if self._are_left and engine.num_steps == self._num_steps:
            self._state, self._are_left = _State.NONE, False
            engine.grad_buffers.clear(range(len(engine.grad_buffers.params)))
            raise self._accumulates("no step has used those of the last batch")
        # A zero_grad of the module's own belongs before the forward, as others do.
        engine.grad_buffers.restore_grads(made)
        self._state, self._num_steps, self._are_left = _State.READY, engine.num_steps, False
        # A device is not read: the host would wait for the whole step there.
        if not devices.is_on_host(grad.device) or float(grad) != 1.0:
            self._reducer.scale_reduced(grad)

    def takes_zero_grad(self) -> bool:
        """Whether a ``zero_grad`` that comes now belongs before the forward; gradients that are ready it drops."""
        self._are_left = False
        if self._state is _State.READY:
            self._state = _State.NONE
        return self._state is _State.MADE


class StagedReducer(Reducer):
    """Launches reductions in the last backward of a batch, and waits for them when the schedule has ended."""

    _defers = False
    _refusal: MegastrategyError | None = None  # of a backward in the schedule, to be raised at its end

    @property
    def would_sync(self) -> bool:
        """Whether a backward would be synchronised that no forward has decided about."""
        return self._should_sync(None)

    def begin_deferring(self) -> None:
        """The backwards that come launch reductions, and leave it to :meth:`finish_deferred` to wait for them."""
        self._defers, self._has_synced, self._refusal = True, False, None
        self.tokens.is_of_batch = True  # a bucket that is on its way has no gradients, and they are not dropped
        self.tokens.drop()

    def end_deferring(self) -> None:
        """The batch broke off: what its backwards have left behind is dropped before the next."""
        self._defers = False

    def drop_unfinished(self) -> None:
        if not self._defers:  # else reductions that are on their way are those of this batch
            super().drop_unfinished()

    def decide_next_backward(self, outputs: Any, *, sync: bool, has_loss: bool) -> None:
        """A backward is about to start from ``outputs``, to be synchronised or not; ``has_loss``: they are a loss."""
        self._prepared.replace(syncs=sync)
        self.tokens.has_loss = has_loss
        self.backwards.forget()
        self.watch(outputs)

    def finish_deferred(self) -> BufferLayout | None:
        """As :meth:`finish_grad_sync`, also where no backward came here: those that wait for this rank get zeros."""
        self._defers = False
        self._has_local_grads |= bool(self._params)
        parts = self.buffers.local_parts
        assert isinstance(parts, StageParts)
        wanted = self.finish_grad_sync(parts)
        if (refusal := self._refusal) is not None:
            self._refusal = None
            raise refusal
        return wanted

    def scale_reduced(self, factor: Tensor) -> None:
        """Multiplies the reduced gradients, as far as this rank has them, by one number."""
        grads = self.buffers.local_grads(range(len(self._params)))
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))

    def count_losses(self) -> LossTokens:
        if not self._defers:
            raise LossTokensError(
                "the losses of a pipeline's microbatches are inside of its forward, and so are their backwards. Count "
                "the tokens of each there: let the loss function return weigh_by_tokens(loss, n), a method of the "
                "wrapped model, the Accelerator, and the Lightning and Fabric strategies"
            )
        return super().count_losses()

    def _end_synchronised(self) -> BufferLayout | None:
        self._has_synced = self._defers and not self.buffers.reduces_every_backward
        # Pooled gradients are reduced after every microbatch, and nothing but the last reduction may be left.
        if self._defers and self._ends_window:
            return None
        try:
            return super()._end_synchronised()
        except _REFUSALS as refusal:
            if not self._defers:
                raise
            super().drop_unfinished()
            self._refusal = self._refusal or refusal  # the other stages wait for the rest of the schedule
            return None
