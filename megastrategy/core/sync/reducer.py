"""Reduces buckets as the hooks of their parameters tell that gradients are ready.

[Note: one synchronised backward]
Hooks count a bucket's gradients; a complete bucket is launched once all buckets before it have been, so every rank
launches the same collectives in the same order, whatever order its gradients arrive in. When the outermost backward
has ended (backward's [Note: the outermost graph]), the buckets that are left (some of their parameters were unused on
this rank) are launched too, the ranks agree on what was used, and all reductions are waited for: gradients are final
when ``backward()`` returns.

[Note: gradients that come twice]
A parameter used by two re-entrant checkpoints gets its gradient in two parts, and no count can tell in advance. If
the second part comes when the bucket is already on the wire, it lands in a tensor of its own (``GradBuffers.seal``
has taken the view away), the ranks agree that the bucket is late, and it is reduced once more with the rest added:
same mean, nothing lost. From then on this rank launches that bucket only at the end of backward. A launch order that
is fixed is what makes this a local decision.

[Note: which backward synchronises]
As in torch DDP it is the first one after a forward of the wrapper that trains and ends outside ``no_sync``, whatever
comes in between: a forward under ``no_sync``, or a validation. The backwards that follow, until the next such forward,
are not. Where the wrapper's forwards were under ``no_sync``, gradients accumulate in the buffers, and a sharded step
reduces them; pooled ones cannot accumulate on a rank, and are sent. A backward that no forward of the wrapper prepared
(of the module by itself for a saliency map, of a loss for the second time) belongs to user code, perhaps on one rank
only. The engine leaves its gradients in ``.grad`` as autograd does, a stand-in's aside, and sends nothing. The next
backward that is prepared takes in what is still there, and so does a sharded step: all ranks step the mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..buffers import FiniteCheck, GradBuffers, has_unreduced, inside_backward, inside_node, late_grad
from ..collectives import Collectives
from ..config import DistributedDataParallelConfig
from ..errors import (
    BucketInFlightError,
    LossTokensError,
    MegastrategyError,
    MicrobatchMismatchError,
    NonFiniteGradError,
)
from ..events import Event, EventKind, Listener, profiler_range
from ..layout import BufferLayout
from ..module import GradAccumulators, GradHooks, ModelGroup
from .agreement import Agreement, Reasons, name_of
from .arrivals import LateGrads, UsedParams
from .backward import BackwardPhase, BackwardWatch, DeferredBatch, Preparation
from .bucket_planner import BucketPlanner
from .launched_buckets import LaunchedBuckets
from .loss_tokens import TOO_LATE, LossTokens

_REFUSALS = (NonFiniteGradError, MicrobatchMismatchError, LossTokensError)
"""The errors that all data-parallel ranks raise alike in a backward."""


class Reducer:
    """Reduces the gradients of one wrapped module.

    Args:
        collectives: all ranks, which agree on what was used.
        shard_collectives: how buckets are reduced.
        should_sync: asked when a backward starts, with what forwards have prepared.
        backwards: reports where backwards begin and end, to the engine.
        planner: watches the first synchronised backward for better buckets; None where none are wanted.
        tensor_ranks: the ranks that hold the parts of a tensor-parallel model; they refuse a backward together.

    Attributes:
        backwards: refers to the engine that it belongs to.
        batch: whether reductions are waited for at the end of a batch; None for at the end of each backward.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Sequence[Parameter],
        buffers: GradBuffers,
        collectives: Collectives,
        shard_collectives: Collectives,
        config: DistributedDataParallelConfig,
        should_sync: Callable[[bool | None], bool],
        backwards: BackwardWatch,
        listener: Listener | None = None,
        planner: BucketPlanner | None = None,
        tensor_ranks: Collectives | None = None,
    ) -> None:
        self.buffers = buffers
        self._params: list[Parameter] = []
        self._collectives, self._tensor_ranks = collectives, tensor_ranks
        self._config, self._should_sync, self._listener = config, should_sync, listener

        self._phase = BackwardPhase.IDLE
        self._is_unfinished = False  # from the end of backward (or a step) on, until all is reduced; after errors too
        self._prepared = Preparation()
        self._unprepared: set[int] = set()  # parameters with gradients of a backward that no forward prepared
        self.backwards = backwards
        self._missing: list[int] = []  # gradients still to come, by bucket
        self._launched = LaunchedBuckets(collectives, shard_collectives, listener, average=config.average_in_collective)
        self._used, self._late = UsedParams(config), LateGrads()
        self._nonfinite = FiniteCheck(  # of this rank's gradients in this backward
            name_of(collectives, tensor_ranks),
            lambda device: collectives.wait_for_device(device, "a collective before check_for_nan_in_grad"),
        )
        self.microbatch = 0
        """Counted by the training loop, if it can; gradients of different microbatches are never mixed."""
        self.num_reductions: list[int] = []
        """Reductions of each parameter's gradient so far; the same on all ranks, whatever they do to ``.grad``."""
        self._has_local_grads = self._has_agreed = False
        self.batch: DeferredBatch | None = None
        self._ends_window = True  # whether the last backward's gradients are final when they are reduced
        self.tokens = LossTokens(name_of(collectives, tensor_ranks))
        self._hooks = GradHooks(self)
        self._accumulators = GradAccumulators()
        self.extend(layout, params)
        self._planner = planner

    def extend(self, layout: BufferLayout, params: Sequence[Parameter]) -> None:
        """Watches the parameters that ``layout`` has beyond those known so far; the buffers have them already."""
        first = len(self._params)
        self.layout = layout
        self._params += params[first:]
        self._used.extend(len(params))
        self.num_reductions += [0] * (len(params) - first)
        self._bucket_of = [slot.bucket for slot in layout.slots]
        self._has_local_grads |= any(self.buffers.has_grad[first:])
        self._planner = None  # what has joined lies apart, and stays there
        self.tokens.follow(self.buffers)
        self._accumulators.extend(params[first:])
        self._hooks.extend(params[first:])

    def follow(self, layout: BufferLayout, buffers: GradBuffers) -> None:
        """Everything has moved to another layout, between two backwards."""
        assert not self._launched.num, "nothing is on the wire"
        self.layout, self.buffers = layout, buffers
        self.tokens.move(buffers)
        self._bucket_of = [slot.bucket for slot in layout.slots]

    def close(self) -> None:
        """Removes the hooks. Reductions in flight are not waited for: after an error elsewhere they might never end."""
        self.abort_unfinished()
        self._hooks.remove()
        self._launched.forget()
        self._accumulators.drop()
        self.tokens.is_used = False

    def abort_unfinished(self) -> None:
        """Ends on the device what a backward that failed had launched there: it may wait for a rank that is gone."""
        self._launched.abort()

    # --- forward -----------------------------------------------------------------------------------------------------

    def prepare_for_backward(self, _: Any) -> None:
        """The next backward is synchronised, as after torch's method of this name."""
        self.before_forward()
        self._prepared.replace(syncs=True)

    def before_forward(self) -> None:
        """A forward starts."""
        if self._phase is not BackwardPhase.IDLE:
            self._prepared.clear()  # for a backward that broke off, and is not tried again
        self.drop_unfinished()
        self._hooks.stay_last()
        self._accumulators.follow_stream()
        self.backwards.forget()

    def update_swapped_params(self) -> None:
        """Watches parameters again inside of which torch has put another tensor since the last forward."""
        if swapped := self.buffers.update_swapped_params():
            self._hooks.revive([self._params[index] for index in swapped])
            self._accumulators.retake()

    def drop_unfinished(self) -> None:
        """Drops what a backward that ended in an exception left behind, when all that it had launched has ended."""
        if not self._is_in_batch:  # whose reductions are on their way
            self._drop_unfinished()

    def _drop_unfinished(self) -> None:
        if self._phase is not BackwardPhase.IDLE or self._is_unfinished:
            self._phase, self._is_unfinished = BackwardPhase.IDLE, False
            for _ in self._launched.wait():
                pass
            self._late.clear()
            self._nonfinite.clear()  # of gradients that are gone: the next backward would be refused for them
            self._has_local_grads = False
            self.buffers.drop_unfinished()
            self.tokens.drop()

    def after_forward(self, outputs: Any, sync: bool) -> None:
        """A forward ended whose backward shall be synchronised or not."""
        self._prepared.add(syncs=sync)
        if not inside_backward():  # a checkpoint's forward starts the inner graph, which ends too early
            self.watch(outputs)

    def prepare(self, outputs: Any, sync: bool) -> None:
        """The next backward starts from tensors in ``outputs``, and shall be synchronised or not."""
        self._prepared.replace(syncs=sync)
        self.watch(outputs)

    @contextlib.contextmanager
    def backwards_inside_forward(self) -> Iterator[None]:
        """Every backward in the block is one of the training; afterwards, none is prepared."""
        self._prepared.inside_forward = True
        try:
            yield
        finally:
            self._prepared.inside_forward = False
            self._prepared.clear()

    def watch(self, outputs: Any) -> None:
        """A backward may start from tensors in ``outputs``."""
        self.backwards.look_at(outputs)

    # --- backward ----------------------------------------------------------------------------------------------------

    def on_backward_start(self) -> None:
        """A backward has begun that a forward's outputs tell of."""
        self._hooks.stay_last()
        if self._phase is BackwardPhase.IDLE:
            self.tokens.on_backward_start()
            self.buffers.start_main_grads()
        self._emit(EventKind.BACKWARD_START, 0)

    def on_grad_accumulated(self, index: int, param: Tensor) -> None:
        bucket = self._bucket_of[index]
        if self._phase is BackwardPhase.IDLE:
            # A layer that adds to the buffer itself has done so, prepared or not.
            if not (self._prepared or self.buffers.main_grads):
                self._unprepared.add(index)
                return
            self._begin_backward()
        elif param.grad is not self.buffers.views[index]:  # create_graph, a sealed bucket, or .grad = None before
            if self._phase is BackwardPhase.SYNCHRONISING and bucket < self._launched.num:  # on the wire
                self._on_late_grad(index)
                return
            self.buffers.adopt_grad(index)
        self.buffers.has_grad[index] = True
        is_first = self._used.add(index)
        syncs = self._phase is BackwardPhase.SYNCHRONISING
        if syncs and self._planner is not None:
            self._planner.note(index)
        if self._listener is not None:
            self._listener(Event(EventKind.GRAD_READY, index))
        if syncs and is_first:  # two parts of one gradient are not two gradients
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0 and self._config.overlap_grad_reduce:
                self._launch_ready()

    def _begin_backward(self) -> None:
        self._ends_window = self._should_sync(self._prepared.decision)
        syncs = self._ends_window or self.buffers.reduces_every_backward
        self._phase = BackwardPhase.SYNCHRONISING if syncs else BackwardPhase.ACCUMULATING
        self._used.begin_backward(self._params)
        needed = self._used.is_needed
        # A bucket with a gradient that came in two parts before expects one too many, so that it waits for the end.
        deferred = {self._bucket_of[index] for index in self._late.deferred}
        self._missing = [sum(needed[i] for i in b.params) + (b.index in deferred) for b in self.layout.buckets]
        self._has_local_grads = True
        self.tokens.begin_backward()
        self._unprepared.clear()
        if syncs and self._planner is not None and not (self.batch is not None and self.batch.has_synced):
            self._planner.start()
        self.buffers.open()
        if not self.backwards.knows_outermost():
            self._emit(EventKind.BACKWARD_START, 0)
            self.backwards.expect_end()

    def on_backward_end(self) -> BufferLayout | None:
        """Sends what is left, or leaves it to accumulate. Returns as :meth:`finish_grad_sync`."""
        self.buffers.finish_main_grads()
        # A graph and one nested in it may both have queued an end: the first to run does it, the other finds it done.
        if self._phase not in (BackwardPhase.ACCUMULATING, BackwardPhase.SYNCHRONISING):
            self.tokens.end_another(is_kept=bool(self._unprepared))
            return None
        synced, self._phase = self._phase is BackwardPhase.SYNCHRONISING, BackwardPhase.IDLE
        self.tokens.end_backward()
        if synced:
            self._prepared.end(inside=inside_node())
            self._is_unfinished = True
        else:
            self.buffers.drop_unused_grads()
            self.tokens.remember(is_final=False)
        wanted = self._end_synchronised() if synced else None
        self._emit(EventKind.BACKWARD_END, int(synced))
        return wanted

    def _end_synchronised(self) -> BufferLayout | None:
        if (batch := self.batch) is not None and batch.is_open:
            batch.has_synced = not self.buffers.reduces_every_backward
            # Pooled gradients are reduced after every backward, and nothing but the last reduction may be left.
            if self._ends_window:
                return None
        try:
            wanted = self.finish_grad_sync()
        except _REFUSALS as refusal:
            if batch is None or not batch.is_open:
                raise
            self._drop_unfinished()
            batch.refusal = batch.refusal or refusal  # other ranks wait for the rest of the batch
            return None
        self._is_unfinished = False
        return wanted

    # --- a batch of several backwards --------------------------------------------------------------------------------

    @property
    def _is_in_batch(self) -> bool:
        return self.batch is not None and self.batch.is_open

    @property
    def would_sync(self) -> bool:
        """Whether a backward would be synchronised that no forward has decided about."""
        return self._should_sync(None)

    def begin_batch(self, batch: DeferredBatch) -> None:
        """The backwards from here on launch reductions, and leave it to :meth:`finish_batch` to wait for them."""
        batch.begin()
        self.tokens.is_of_batch = True  # a bucket that is on its way has no gradients, and they are not dropped
        self.tokens.drop()

    def finish_batch(
        self, batch: DeferredBatch, copies: ModelGroup
    ) -> tuple[BufferLayout | None, MegastrategyError | None]:
        """As :meth:`finish_grad_sync`, also where no backward came here: ranks that wait for this one get zeros.

        Returns also the error with which all data-parallel ranks refuse the gradients, if they do.
        """
        batch.is_open = False
        self._has_local_grads |= bool(self._params)
        try:
            wanted = self.finish_grad_sync(copies)
        except _REFUSALS as refusal:
            return None, refusal
        return (wanted, None) if batch.refusal is None else (None, batch.refusal)

    def _on_late_grad(self, index: int) -> None:
        bucket = self._bucket_of[index]
        self.buffers.check_late_main_grad(index)
        if not self._used.are_exchanged:
            raise BucketInFlightError(
                f"parameter {self.layout.params[index].name!r}: a second gradient arrived in one backward after "
                f"bucket {bucket} had been launched (a second backward inside the first, or a layer used by two "
                "re-entrant checkpoints). Leave find_unused_parameters on and static_graph off, so that the ranks "
                "can agree to reduce the bucket again, or use checkpoint(use_reentrant=False)"
            )
        self._late.add(index)
        if self._planner is not None:
            self._planner.note(index)

    # --- averages by tokens ------------------------------------------------------------------------------------------

    def count_losses(self) -> LossTokens:
        """Returns the window that counts losses.

        Raises:
            LossTokensError: if the others, with which nothing is agreed on any more, would not know of it, or in a
                model whose losses are all inside of a batch, outside of one.
        """
        if self.batch is not None and not self.batch.is_open:
            raise LossTokensError(self.batch.why_not_counted)
        if not (self.tokens.is_used or self._must_agree() or not self._has_agreed or self._collectives.size == 1):
            raise LossTokensError(TOO_LATE)
        return self.tokens.begin_use(is_open=self._has_local_grads or not self._ends_window)

    # --- reduction ---------------------------------------------------------------------------------------------------

    @property
    def has_local_grads(self) -> bool:
        """Whether something is accumulated of which nothing was sent."""
        return self._has_local_grads and not self._launched.num

    def finish_grad_sync(self, copies: ModelGroup | None = None) -> BufferLayout | None:
        """Reduces what is accumulated and not reduced yet, and waits; nothing to do after a synchronised backward.

        Collective: all ranks call it in the same state (each after the same number of synchronised backwards).

        Args:
            copies: adds up the gradients of parameters that ranks of other stages have as well.

        Returns:
            The layout that everything should move to now, the same on all ranks; None to stay in the present one.

        Raises:
            CollectiveError: if a reduction failed, most often because another rank ended.
            UnusedParameterError: if a parameter has no gradient against what the configuration promises.
        """
        self._take_in_unprepared()
        if not self._has_local_grads:
            self.tokens.finish(self._collectives, self._tensor_ranks)  # of pooled gradients, which all are reduced
            return None
        # Pooled gradients of a backward under no_sync() are not; those that a step asks for are.
        is_final = self._ends_window or not (self._is_unfinished and self.buffers.reduces_every_backward)
        self._used.check_promises(self.buffers, self._collectives.rank)
        self._is_unfinished, copies = True, copies or ModelGroup()
        while self._launched.num < len(self.layout.buckets):  # used here or not: all ranks launch the same
            self._launch(self._launched.num)
        self._emit(EventKind.WAIT_START, 0)
        self._phase = BackwardPhase.WAITING
        try:
            with profiler_range("wait for gradients"):
                # Before anything is published: what .grad becomes depends on what other ranks used.
                try:
                    late_buckets, moves = self._agree()
                except MegastrategyError:
                    # The ranks with copies wait for those of this one, and learn of the refusal afterwards.
                    copies.agree_on_copies(self._params, list(self.buffers.has_grad))
                    copies.add_up_copies(self._params, self.buffers.local_bucket_of)
                    raise
                for index, used in enumerate(self.buffers.has_grad):
                    self.num_reductions[index] += used
                copies.agree_on_copies(self._params, self.buffers.has_grad)
                for bucket in self._launched.wait():
                    self._late.detach(self.layout.buckets[bucket], self.buffers)
                    self.buffers.publish(bucket)
                for bucket in late_buckets:
                    self._reduce_again(bucket)
                copies.add_up_copies(self._params, self.buffers.local_bucket_of)
                if is_final:
                    self.tokens.finish(self._collectives, self._tensor_ranks)
            self._used.note_reduced(self.buffers.has_grad)
        finally:
            self._phase = BackwardPhase.IDLE
            self._emit(EventKind.WAIT_END, 0)
            self._late.clear()
            self._nonfinite.clear()
            self._has_local_grads = False
        planner, self._planner = self._planner, None
        # Gradients are final and nothing is on the wire: the one moment at which all ranks can move.
        wanted = planner.finish(self.layout, moves=moves) if planner is not None else None
        self.tokens.remember(is_final=is_final)
        self._is_unfinished = False
        return wanted

    def is_local(self, index: int) -> bool:
        """Whether a backward that no forward prepared has left a gradient of the parameter on this rank."""
        return index in self._unprepared and has_unreduced(self.buffers.params[index])

    def _take_in_unprepared(self) -> None:
        local = [index for index in self._unprepared if self.is_local(index)]
        self._unprepared.clear()
        if not local:
            return
        self.buffers.open()
        self._used.begin_unprepared()
        for index in local:
            self.buffers.has_grad[index] = True
            self._used.add(index)
        self._has_local_grads = True

    def _launch_ready(self) -> None:
        while self._launched.num < len(self._missing) and self._missing[self._launched.num] == 0:
            self._launch(self._launched.num)

    def _launch(self, bucket: int) -> None:
        with profiler_range("reduce", bucket):
            self.buffers.seal(bucket)
            if self._config.check_for_nan_in_grad:
                self.buffers.find_nonfinite(bucket, self._nonfinite)
            self._launched.launch(bucket, self.buffers)

    def _agree(self) -> tuple[list[int], bool]:
        """Makes ``has_grad`` say what any rank used. Returns the buckets in which any rank has late gradients, and
        whether any wants another order of buckets.

        Raises, on all ranks alike:
            MicrobatchMismatchError: if the ranks are not at the same microbatch.
            NonFiniteGradError: if any rank had a gradient that is not finite, and the configuration checks it.
            LossTokensError: if losses were counted by tokens in part.
        """
        agrees = self._used.are_exchanged
        has_grad = self.buffers.has_grad
        # A static graph publishes what any rank used in its first backward: a rank that used less of it gets the mean
        # all the same.
        if not agrees and self._used.of_static_graph is not None:
            has_grad[:] = self._used.of_static_graph
        planner = self._planner
        wants = planner is not None and planner.wants_other_order(
            self.layout, self._late.deferred, self._used.is_needed
        )
        # All ranks exchange, or none does, so this asks for what all of them know alike. Whether losses are counted by
        # tokens is known alike only after an exchange, so the first backward has one.
        if not (self._must_agree() or planner is not None or self.tokens.is_used or not self._has_agreed):
            return [], False
        used = self._used.unreduced(self.buffers)
        late_buckets = {self._bucket_of[index] for index in self._late.params}
        if self._config.check_for_nan_in_grad:
            part_of = self.buffers.local_parts.local_view
            late = {index: part_of(late_grad(self.buffers.params[index])) for index in self._late.params}
            self._nonfinite.check_grads(late, self.layout)
        agreement = Agreement(
            used=list(has_grad),
            late=[bucket.index in late_buckets for bucket in self.layout.buckets],
            microbatch=self.microbatch,
            has_nonfinite=bool(self._nonfinite.found()),
            wants_other_order=wants,
            counting=self.tokens.counting,
        ).over_ranks(self._collectives, self._tensor_ranks)
        if agreement.is_refused:
            own = Reasons(self._nonfinite.rank, self.microbatch, self._nonfinite.found(), self.tokens.state)
            self.drop_unfinished()  # shards that sums are added to would keep what is not finite
            raise agreement.refusal(own, self._collectives, self._tensor_ranks)
        self._has_agreed = True
        self.tokens.follow_others(are_counted=agreement.counting[0])
        if not agrees:
            return [], agreement.wants_other_order
        has_grad[:] = agreement.used
        self._used.agree(has_grad, used)
        return [bucket for bucket, flag in enumerate(agreement.late) if flag], agreement.wants_other_order

    def _must_agree(self) -> bool:
        """Whether every synchronised backward ends with an exchange."""
        return self._used.are_exchanged or self._config.check_for_nan_in_grad

    def _reduce_again(self, bucket: int) -> None:
        """Adds late gradients to a reduced bucket, on ranks that have some, and reduces it once more, on all."""
        buffers = self.buffers
        buffers.add_to_reduced(bucket, self._late.pop(self.layout.buckets[bucket]))
        buffers.seal(bucket)
        self._launched.reduce_again(bucket, buffers)
        buffers.publish(bucket)

    def _emit(self, kind: EventKind, index: int) -> None:
        if self._listener is not None:
            self._listener(Event(kind, index))
