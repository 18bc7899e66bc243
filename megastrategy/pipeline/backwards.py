"""Connects the backwards that a pipeline runs inside of its forward, microbatch by microbatch, to the engine.

[Note: backwards inside of a forward]
A schedule runs all forwards and backwards of a batch, so that ``loss.backward()`` has nothing left to compute when the
module's forward has returned. Three rules follow.

- Gradients begin at zero when the forward begins. A ``zero_grad`` between the forward and ``loss.backward()``, as many
  loops have it, counts as one before the forward. If none has come when ``loss.backward()`` runs, the loop wanted to
  accumulate over batches, which is an error.
- ``loss.backward()`` multiplies the gradients by the factor that the loss was multiplied with.
- The last backward of each stage launches reductions, and they are waited for when the schedule has ended. A stage that
  waited in its last backward would not send the gradient of its input, for which other stages wait.

[Note: several stages per rank]
Under an interleaved schedule the last stage of a rank finishes its backwards before the rank's other stages. Parameters
are laid out from the last layer to the first, so the first buckets belong to that stage, and are launched then. Later
backwards accumulate while these buckets are on the wire, and reach none of their parameters.
"""

from __future__ import annotations

import enum
import struct
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..core import Collectives, DeferredBatch, Engine, ModelGroup, devices
from ..errors import MegastrategyError, StageError

_FACTOR = struct.Struct("<d")
"""The factor of the correction to the mean over tokens; 0.0 if there is none."""

_WHY_NOT_COUNTED = (
    "the losses of a pipeline's microbatches are inside of its forward, and so are their backwards. Count the tokens "
    "of each there: let the loss function call count_tokens(n), a method of the wrapped model, the Accelerator, and "
    "the Lightning and Fabric strategies"
)


class _State(enum.Enum):
    """The state of a batch's gradients."""

    NONE = enum.auto()
    """There are none, or they were dropped."""
    MADE = enum.auto()
    """The forward has returned, and the backward of its loss has not run."""
    READY = enum.auto()
    """The backward of the loss has run; a step may use them."""


class StagedBackwards:
    """The backwards that the forward of one wrapped pipeline runs.

    Args:
        group: the ranks of the stages.
        first_stages: by rank, the number of its first stage.
    """

    def __init__(self, engine: Engine, group: ModelGroup, first_stages: Sequence[int]) -> None:
        # Weak: the user's module refers to this object, and engine and group are freed without close().
        self._engine = weakref.ref(engine)
        self._group = weakref.ref(group)
        self._first_stages = first_stages
        self._batch = engine.backwards.batch = DeferredBatch(_WHY_NOT_COUNTED)
        self._state = _State.NONE
        self._num_steps = 0  # when the gradients became ready
        self._are_left = False  # gradients of an earlier batch were ready when the forward began
        self._made: list[Tensor | None] = []  # .grad by parameter, between forward and backward

    @property
    def _present(self) -> Engine:
        engine = self._engine()
        assert engine is not None, "it detaches itself from the module"
        return engine

    def begin(self, num_microbatches: int) -> None:
        """Begins the gradients of a batch, before a forward that trains. Raises StageError if gradients are to
        accumulate over several batches."""
        engine = self._present
        if not engine.backwards.would_sync:
            raise self._accumulates("it was called under no_sync()")
        self._are_left |= self._state is _State.READY
        self._made = []
        self._batch.num_losses = num_microbatches
        engine.begin_batch(self._batch)

    @staticmethod
    def _accumulates(why: str) -> StageError:
        return StageError(
            f"gradients of several batches do not accumulate in a pipeline, whose forward begins from zero: {why}. Let "
            "one batch have more microbatches, or drop the gradients first (optimizer.zero_grad()). A loss of two "
            "forwards is computed in one: the second's layers behind the first's"
        )

    def before_backward(self, outputs: Any, *, is_last: bool, has_loss: bool) -> None:
        """Prepares a backward that starts from ``outputs``.

        Args:
            outputs: the outputs of a stage, or the loss of a microbatch.
            is_last: whether no later backward of the batch reaches a parameter of this one.
            has_loss: whether ``outputs`` are a loss.
        """
        self._present.prepare_backward(outputs, is_last=is_last, has_loss=has_loss)

    def finish(self, problem: str = "") -> None:
        """Waits for the reductions, when the schedule has ended on this stage. Collective over all stages.

        Args:
            problem: the reason of this stage to reject the gradients; empty if they are right.

        Raises:
            StageError: on all stages, if there is a problem on any.
            MegastrategyError: on all stages, if those of any stage are rejected. All gradients are dropped then.
        """
        engine = self._present
        group = self._group()
        assert group is not None, "the engine has it"
        assert group.ranks is not None, "it is connected"
        refusal = engine.finish_batch(self._batch)
        self._state = _State.NONE
        try:
            self._agree(engine, group.ranks, StageError(problem) if problem else refusal)
        except MegastrategyError:
            engine.drop_grads()
            raise
        self._state = _State.MADE
        self._made = [param.grad for param in engine.params]

    def _agree(self, engine: Engine, ranks: Collectives, refusal: MegastrategyError | None) -> None:
        # Between hosts, without waiting for the device. Only the last stage has losses to count.
        [refused, *factor] = ranks.host.max_of_bytes([refusal is not None, *_FACTOR.pack(engine.token_factor)])
        if not refused:
            [of_last_stage] = _FACTOR.unpack(bytes(factor))
            if of_last_stage and not engine.token_factor:
                engine.correct_by_tokens(of_last_stage)
            return
        reason = None if refusal is None else (type(refusal), str(refusal))
        for rank, theirs in enumerate(ranks.all_gather_objects(reason)):
            if theirs is not None:
                kind, text = theirs
                raise kind(f"stage {self._first_stages[rank]}: {text}") from refusal

    def abandon(self) -> None:
        """Ends the batch after an exception; the next forward drops the gradients of its backwards."""
        self._state = _State.NONE
        self._batch.is_open = False

    def use(self, grad: Tensor) -> None:
        """Makes the gradients ready, in the backward of the loss, multiplied by ``grad`` (one number).

        Raises:
            StageError: if this is the second backward of the loss, or comes after the next forward.
        """
        engine = self._present
        if self._state is not _State.MADE:
            raise StageError(
                "backward was called twice for the loss of one forward of a pipeline, or after the next forward: its "
                "gradients were computed in the forward, once"
            )
        made = self._made
        self._made = []
        if self._are_left and engine.num_steps == self._num_steps:
            self._state = _State.NONE
            self._are_left = False
            engine.drop_grads()
            raise self._accumulates("no step has used those of the last batch")
        # A zero_grad() of the plain module counts as one before the forward, too.
        engine.restore_grads(made)
        self._state = _State.READY
        self._num_steps = engine.num_steps
        self._are_left = False
        # Not read from an accelerator: the host would wait for the whole step.
        if not devices.is_on_host(grad.device) or float(grad) != 1.0:
            engine.scale_grads(grad)

    def takes_zero_grad(self) -> bool:
        """Whether a ``zero_grad`` now counts as one before the forward. Gradients that are ready it drops."""
        self._are_left = False
        if self._state is _State.READY:
            self._state = _State.NONE
        return self._state is _State.MADE
