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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import Collectives, DeferredBatch, Engine, ModelGroup, devices
from ..errors import MegastrategyError, StageError

_FACTOR = struct.Struct("<d")
"""The factor of the correction to the mean over tokens; 0.0 where there is none."""

_WHY_NOT_COUNTED = (
    "the losses of a pipeline's microbatches are inside of its forward, and so are their backwards. Count the tokens "
    "of each there: let the loss function return weigh_by_tokens(loss, n), a method of the wrapped model, the "
    "Accelerator, and the Lightning and Fabric strategies"
)


class _State(enum.Enum):
    """Tells how far the gradients of a batch have come."""

    NONE = enum.auto()
    """There are none, or they were dropped."""
    MADE = enum.auto()
    """The forward has returned, and the backward of its loss has not come yet."""
    READY = enum.auto()
    """It has come; a step may use them."""


class StagedBackwards:
    """Connects the backwards that a pipeline's forward runs to the engine.

    Args:
        ranks: of the stages.
        places: by rank, the number of its first stage.
        copies: adds up the gradients of copies of tied weights.
    """

    def __init__(self, engine: Engine, ranks: Collectives, places: Sequence[int], copies: ModelGroup) -> None:
        self._engine = weakref.ref(engine)  # which has this object, as the user's module does
        self._ranks, self._places, self._copies = ranks, places, copies
        self._batch = engine.reducer.batch = DeferredBatch(_WHY_NOT_COUNTED)
        self._state = _State.NONE
        self._num_steps = 0  # when the gradients became ready
        self._are_left = False  # those of an earlier batch were ready when the forward began
        self._made: list[Tensor | None] = []  # .grad by parameter, between forward and backward

    @property
    def _present(self) -> Engine:
        engine = self._engine()
        assert engine is not None, "it detaches itself from the module"
        return engine

    def begin(self) -> None:
        """A forward that trains begins.

        Raises:
            StageError: if gradients are to accumulate over several batches.
        """
        engine = self._present
        if not engine.reducer.would_sync:
            raise self._accumulates("it was called under no_sync()")
        self._are_left |= self._state is _State.READY
        self._made = []
        self._clear(engine)
        engine.reducer.begin_batch(self._batch)

    @staticmethod
    def _clear(engine: Engine) -> None:
        engine.grad_buffers.clear(range(len(engine.grad_buffers.params)))

    @staticmethod
    def _accumulates(why: str) -> StageError:
        return StageError(
            f"gradients of several batches do not accumulate in a pipeline, whose forward begins from zero: {why}. Let "
            "one batch have more microbatches, or drop the gradients first (optimizer.zero_grad()). A loss of two "
            "forwards is computed in one: the second's layers behind the first's"
        )

    def before_backward(self, outputs: Any, *, is_last: bool, has_loss: bool) -> None:
        """A backward is about to start from ``outputs``, which are the loss of a microbatch if it ``has_loss``;
        ``is_last``: no other backward of this batch reaches a parameter that it reaches."""
        reducer = self._present.reducer
        reducer.tokens.has_loss = has_loss
        reducer.backwards.forget()
        reducer.prepare(outputs, sync=is_last)

    def finish(self, problem: str = "") -> None:
        """The schedule has ended on this stage, and nothing is on its way between stages. Collective over all stages.

        Args:
            problem: why its gradients are of no use, as far as this stage knows; empty if they are right.

        Raises:
            StageError: on all stages, if there is a problem on any.
            MegastrategyError: on all stages, if the gradients of any are refused; all are dropped then.
        """
        engine = self._present
        wanted, refusal = engine.reducer.finish_batch(self._batch, self._copies)
        engine.move_to(wanted)
        self._state = _State.NONE
        try:
            self._agree(engine, StageError(problem) if problem else refusal)
        except MegastrategyError:
            self._clear(engine)
            raise
        self._state = _State.MADE
        self._made = [param.grad for param in engine.grad_buffers.params]

    def _agree(self, engine: Engine, refusal: MegastrategyError | None) -> None:
        # On the hosts: what the device has launched is not waited for. Only the last stage has losses to count.
        tokens = engine.reducer.tokens
        [refused, *factor] = self._ranks.host.max_of_bytes([refusal is not None, *_FACTOR.pack(tokens.factor)])
        if not refused:
            [of_last_stage] = _FACTOR.unpack(bytes(factor))
            if of_last_stage and not tokens.factor:
                tokens.scale(of_last_stage)
            return
        reason = None if refusal is None else (type(refusal), str(refusal))
        for rank, theirs in enumerate(self._ranks.all_gather_objects(reason)):
            if theirs is not None:
                kind, text = theirs
                raise kind(f"stage {self._places[rank]}: {text}") from refusal

    def abandon(self) -> None:
        """The schedule broke off in an exception: what its backwards have left is dropped before the next."""
        self._state = _State.NONE
        self._batch.is_open = False

    def use(self, grad: Tensor) -> None:
        """The backward of the loss has come; ``grad``: one number, with which the loss was multiplied since.

        Raises:
            StageError: if it came before, or the next forward did.
        """
        engine = self._present
        if self._state is not _State.MADE:
            raise StageError(
                "backward was called twice for the loss of one forward of a pipeline, or after the next forward: its "
                "gradients were computed in the forward, once"
            )
        made, self._made = self._made, []
        if self._are_left and engine.num_steps == self._num_steps:
            self._state, self._are_left = _State.NONE, False
            self._clear(engine)
            raise self._accumulates("no step has used those of the last batch")
        # A zero_grad of the module's own belongs before the forward, as others do.
        engine.grad_buffers.restore_grads(made)
        self._state, self._num_steps, self._are_left = _State.READY, engine.num_steps, False
        # A device is not read: the host would wait for the whole step there.
        if not devices.is_on_host(grad.device) or float(grad) != 1.0:
            grads = engine.grad_buffers.local_grads(range(len(engine.params)))
            if grads:
                torch._foreach_mul_(grads, grad.to(grads[0].dtype))

    def takes_zero_grad(self) -> bool:
        """Whether a ``zero_grad`` that comes now belongs before the forward; gradients that are ready it drops."""
        self._are_left = False
        if self._state is _State.READY:
            self._state = _State.NONE
        return self._state is _State.MADE
