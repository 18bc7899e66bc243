"""Reduces each bucket as soon as the hooks of all its parameters have fired.

[Note: when a bucket is launched]
Hooks count the gradients of a bucket. A complete bucket is launched when all buckets before it have been launched, so
every rank launches the same collectives in the same order, whatever the order of its gradients. When the outermost
backward has ended (backward's [Note: when a backward has ended]), the remaining buckets are launched, with parameters
that were unused on this rank. The ranks agree on the used parameters and wait for all reductions: gradients are final
when ``backward()`` returns.

[Note: why a late gradient is not lost]
A parameter of two re-entrant checkpoints gets its gradient in two parts, and no count can know this in advance. If the
second part arrives when the bucket is on the wire, autograd stores it in a tensor of its own, since
``GradBuffers.seal`` has removed the view. The ranks agree that the bucket is late, and reduce it once more with the
second part added: the mean is the same. From then on this rank launches the bucket only at the end of backward. This is
a local decision, since the order of launches is fixed.

[Note: which backward synchronises]
As in torch DDP it is the first backward after a forward of the wrapper that trains and ends outside ``no_sync``,
whatever comes between the two: a forward under ``no_sync``, or a validation. Further backwards until the next such
forward do not synchronise. If the wrapper's forwards were under ``no_sync``, gradients accumulate in the buffers, and a
sharded step reduces them; pooled gradients cannot accumulate on a rank, and are sent. A backward that no forward of the
wrapper prepared (of the module itself for a saliency map, or of a loss for the second time) belongs to user code,
perhaps on one rank only. The engine leaves its gradients in ``.grad`` (or in a stand-in), and sends nothing. The next
backward that is prepared, or a sharded step, includes the gradients that are still there: all ranks step the mean.

[Note: why torch refuses to swap a parameter]
``torch.utils.swap_tensors`` exchanges the contents of two tensors. With the flag
``torch.__future__.set_swap_module_params_on_conversion``, ``load_state_dict`` and ``Module.to`` use it. A Parameter
would lose its hooks without a trace, and the ranks' weights would part. torch does not swap a tensor to which a weak
reference exists, so the reducer has one to each parameter. ``Module.to`` always swaps DTensors: their hooks are
restored instead.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..buffers import (
    FiniteCheck,
    GradBuffers,
    has_unreduced,
    inside_backward,
    inside_node,
    late_grad,
    stepped_in_backward,
)
from ..collectives import Collectives
from ..config import DistributedDataParallelConfig
from ..errors import (
    BucketInFlightError,
    CollectiveError,
    LayoutMismatchError,
    LossTokensError,
    MegastrategyError,
    MicrobatchMismatchError,
    NonFiniteGradError,
)
from ..events import Event, EventKind, Listener, emit, profiler_range
from ..layout import BufferLayout, Domain
from ..module import GradAccumulators, GradHooks, ModelGroup
from .across import AcrossReplicas
from .agreement import Agreement, Reasons, name_of
from .arrivals import LateGrads, UsedParams
from .backward import BackwardPhase, BackwardWatch, DeferredBatch, Preparation
from .bucket_planner import BucketPlanner
from .launched_buckets import LaunchedBuckets
from .loss_tokens import TOO_LATE, LossTokens

_REFUSALS = (NonFiniteGradError, MicrobatchMismatchError, LossTokensError, LayoutMismatchError)
"""The errors that all data-parallel ranks raise alike in a backward."""


class Reducer:
    """Reduces the gradients of one wrapped module.

    Args:
        collectives: all data-parallel ranks, which agree on the used parameters.
        ranks_of, across: see :class:`LaunchedBuckets`.
        should_sync: called when a backward starts, with the decision of the forwards before it.
        backwards: reports to the engine where backwards begin and end.
        planner: proposes an order of buckets after the first synchronised backward; None for none.
        tensor_ranks: the tensor ranks, which reject a backward together.

    Attributes:
        batch: None unless reductions are waited for at the end of a batch of several backwards.
        microbatch: the number of the microbatch, if the training loop counts them. Gradients of different ones are
            never mixed.
        num_reductions: by parameter, the reductions of its gradient so far, the same on all ranks.
        tokens: the window of losses that are weighed by tokens.
        stepped_options: the options of the steps since the last agreement, which all ranks share.
    """

    def __init__(
        self,
        buffers: GradBuffers,
        collectives: Collectives,
        ranks_of: Callable[[Domain], Collectives],
        config: DistributedDataParallelConfig,
        should_sync: Callable[[bool | None], bool],
        backwards: BackwardWatch,
        listener: Listener | None = None,
        planner: BucketPlanner | None = None,
        tensor_ranks: Collectives | None = None,
        across: AcrossReplicas | None = None,
    ) -> None:
        self.buffers, self.across = buffers, across
        self._collectives, self._tensor_ranks = collectives, tensor_ranks
        self._config, self._should_sync, self._listener = config, should_sync, listener

        self._phase = BackwardPhase.IDLE
        self._is_unfinished = False  # from the end of backward (or a step) until all is reduced, and after errors
        self._prepared = Preparation()
        self._unprepared: set[int] = set()  # parameters with gradients of a backward that no forward prepared
        self.backwards = backwards
        self.engine = backwards.engine
        self._missing: list[int] = []  # gradients still to come, by bucket
        self._launched = LaunchedBuckets(collectives, ranks_of, listener, across=across)
        self._used, self._late = UsedParams(config), LateGrads()
        self._nonfinite = FiniteCheck(  # of this rank's gradients in this backward
            name_of(collectives, tensor_ranks),
            lambda device: collectives.wait_for_device(device, "a collective before check_for_nan_in_grad"),
        )
        self.microbatch = 0
        self.num_reductions: list[int] = []
        self._has_local_grads = self._has_agreed = False
        self._num_agreements = 0
        self.stepped_options: list[float] = []
        self.batch: DeferredBatch | None = None
        self._ends_window = True  # whether the last backward's gradients are final when they are reduced
        self.tokens = LossTokens(name_of(collectives, tensor_ranks))
        self._hooks = GradHooks(self)
        self._versions: list[int] = []  # of the parameters when a backward began, if user code has hooks
        self._swap_guards: list[weakref.ref[Parameter]] = []
        self._accumulators = GradAccumulators()
        self.extend()
        self._planner = planner

    @property
    def _layout(self) -> BufferLayout:
        return self.buffers.layout

    def extend(self) -> None:
        """Registers hooks for parameters that have joined the buffers."""
        known = len(self.num_reductions)
        joined = self.buffers.params[known:]
        self._used.extend(len(joined))
        self.num_reductions += [0] * len(joined)
        self._bucket_of = [slot.bucket for slot in self._layout.slots]
        self._has_local_grads |= any(self.buffers.has_grad[known:])
        self._planner = None  # buckets of added parameters are the last ones, and stay there
        self.tokens.buffers = self.buffers
        self._accumulators.extend(joined)
        self._hooks.extend(joined)
        # See [Note: why torch refuses to swap a parameter].
        is_plain = (self.buffers.local_parts.local_view(param) is param for param in joined)
        self._swap_guards += [weakref.ref(param) for param, guard in zip(joined, is_plain, strict=True) if guard]

    def move_to(self, buffers: GradBuffers) -> None:
        """Continues in buffers with another layout of the same parameters, between two backwards."""
        assert not self._launched.num, "nothing is on the wire"
        self.buffers = buffers
        self.tokens.move_to(buffers)
        self._bucket_of = [slot.bucket for slot in self._layout.slots]

    def close(self) -> None:
        """Removes the hooks, without waiting for reductions: after an error on another rank they might never end."""
        self.abort_unfinished()
        self._hooks.remove()
        self._swap_guards.clear()
        self._launched.forget()
        self._accumulators.drop()
        self.tokens.is_used = False

    def abort_unfinished(self) -> None:
        """Ends reductions of a backward that failed, on the device: they may wait for a rank that is gone."""
        self._launched.abort()

    # --- forward -----------------------------------------------------------------------------------------------------

    def prepare_for_backward(self, _: Any) -> None:
        """The next backward is synchronised, but not under ``no_sync``, where torch's pipelining calls this, too."""
        self.before_forward()
        self._prepared.replace(syncs=self._should_sync(None))

    def before_forward(self) -> None:
        """Called before a forward."""
        if self._phase is not BackwardPhase.IDLE:
            self._prepared.clear()  # it was for a backward that raised and is not repeated
        self.drop_unfinished()
        self._versions = []
        self._hooks.move_to_end()
        self._accumulators.update_stream()
        self.backwards.reset()

    def update_swapped_params(self) -> None:
        """Restores hooks and nodes of parameters whose inner tensor torch has swapped since the last forward."""
        if swapped := self.buffers.update_swapped_params():
            self._hooks.restore([self.buffers.params[index] for index in swapped])
            self._accumulators.recreate()

    def drop_unfinished(self) -> None:
        """Drops gradients of a backward that raised, after its reductions have ended; never inside of a batch."""
        if not self._is_in_batch:
            self._drop_unfinished()

    def _drop_unfinished(self) -> None:
        if self._phase is not BackwardPhase.IDLE or self._is_unfinished:
            self._phase, self._is_unfinished = BackwardPhase.IDLE, False
            if self.across is not None:
                self.across.abandon()
            for _ in self._launched.wait():
                pass
            self._late.clear()
            self._nonfinite.clear()  # otherwise the next backward would be rejected for dropped gradients
            self._has_local_grads = False
            self.buffers.drop_unfinished()
            self.tokens.drop()

    def after_forward(self, outputs: Any, sync: bool) -> None:
        """Called after a forward that trains; ``sync``: whether its backward is synchronised."""
        self._prepared.add(syncs=sync)
        if not inside_backward():  # the outputs of a checkpoint's forward are in an inner graph, which ends too early
            self.watch(outputs)

    def prepare(self, outputs: Any, sync: bool) -> None:
        """Prepares the next backward, which starts from tensors in ``outputs``, to be synchronised or not."""
        self._prepared.replace(syncs=sync)
        self.watch(outputs)

    @contextlib.contextmanager
    def backwards_inside_forward(self) -> Iterator[None]:
        """Counts every backward in the block as prepared; afterwards none is."""
        self._prepared.inside_forward = True
        try:
            yield
        finally:
            self._prepared.inside_forward = False
            self._prepared.clear()

    def watch(self, outputs: Any) -> None:
        """Reports a backward that starts from tensors in ``outputs``."""
        self.backwards.watch(outputs)

    # --- backward ----------------------------------------------------------------------------------------------------

    def on_backward_start(self) -> None:
        """Called when a backward has begun at the outputs of a forward."""
        self._hooks.move_to_end()
        if self._phase is BackwardPhase.IDLE:
            self._versions = [param._version for param in self.buffers.params] if self._hooks.has_others else []
            self.tokens.on_backward_start()
            self.buffers.start_main_grads()
        emit(self._listener, EventKind.BACKWARD_START, 0)

    def on_grad_accumulated(self, index: int, param: Tensor) -> None:
        """Called by the hook of a parameter."""
        bucket = self._bucket_of[index]
        if self._phase is BackwardPhase.IDLE:
            # A layer that adds to the buffer itself has done so in a backward that is not prepared, too.
            if not (self._prepared or self.buffers.main_grads):
                self._unprepared.add(index)
                return
            self._check_users_hooks(index, param)
            self._begin_backward()
        else:
            grad = param.grad
            if grad is None or self._versions:
                self._check_users_hooks(index, param)
            if grad is not self.buffers.views[index]:  # create_graph, a sealed bucket, or .grad = None before
                if self._phase is BackwardPhase.SYNCHRONISING and bucket < self._launched.num:  # on the wire
                    self._on_late_grad(index)
                    return
                self.buffers.adopt_grad(index)
        self.buffers.has_grad[index] = True
        is_first = self._used.add(index)
        syncs = self._phase is BackwardPhase.SYNCHRONISING
        if syncs and self._planner is not None:
            self._planner.record_arrival(index)
        if self._listener is not None:
            self._listener(Event(EventKind.GRAD_READY, index))
        if syncs and is_first:  # two parts of one gradient are not two gradients
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0 and self._config.overlap_grad_reduce:
                self._launch_ready()

    def _check_users_hooks(self, index: int, param: Tensor) -> None:
        """Raises ParameterChangedError if a hook of user code, which has run, stepped the parameter or dropped its
        gradient."""
        is_stepped = bool(self._versions) and param._version != self._versions[index]
        if is_stepped or (param.grad is None and index not in self.buffers.main_grads):
            raise stepped_in_backward(self._layout.params[index].name)

    def _begin_backward(self) -> None:
        if self.across is not None:
            self.across.begin_backward(self.buffers)
        self._ends_window = self._should_sync(self._prepared.decision)
        syncs = self._ends_window or self.buffers.reduces_every_backward
        self._phase = BackwardPhase.SYNCHRONISING if syncs else BackwardPhase.ACCUMULATING
        self._used.begin_backward(self.buffers.params)
        needed = self._used.is_needed
        # A bucket that ever had a late gradient expects one too many, so that it is launched at the end.
        deferred = {self._bucket_of[index] for index in self._late.deferred}
        self._missing = [sum(needed[i] for i in b.params) + (b.index in deferred) for b in self._layout.buckets]
        self._has_local_grads = True
        self.tokens.begin_backward()
        self._unprepared.clear()
        if syncs and self._planner is not None and not (self.batch is not None and self.batch.has_synced):
            self._planner.start()
        self.buffers.open()
        if not self.backwards.expects_end:
            emit(self._listener, EventKind.BACKWARD_START, 0)
            self.backwards.expect_end()

    def on_backward_end(self) -> BufferLayout | None:
        """Sends the remaining buckets, or lets gradients accumulate. Returns as :meth:`finish_grad_sync`."""
        self._versions = []
        self.buffers.finish_main_grads()
        # A graph and a graph nested in it may both have queued this: the first call does the work.
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
        emit(self._listener, EventKind.BACKWARD_END, int(synced))
        return wanted

    def _end_synchronised(self) -> BufferLayout | None:
        if (batch := self.batch) is not None and batch.is_open:
            batch.has_synced = not self.buffers.reduces_every_backward
            # Pooled gradients are reduced after every backward; only the last reduction may be left to finish_batch().
            if self._ends_window:
                return None
        try:
            wanted = self.finish_grad_sync()
        except _REFUSALS as refusal:
            if batch is None or not batch.is_open:
                raise
            self._drop_unfinished()
            batch.refusal = batch.refusal or refusal  # raised at the end: other ranks wait for the rest of the batch
            return None
        self._is_unfinished = False
        return wanted

    # --- a batch of several backwards --------------------------------------------------------------------------------

    @property
    def _is_in_batch(self) -> bool:
        return self.batch is not None and self.batch.is_open

    @property
    def would_sync(self) -> bool:
        """Whether a backward inside of a forward would be synchronised now."""
        return self._should_sync(None)

    def begin_batch(self, batch: DeferredBatch) -> None:
        """Begins a batch: :meth:`finish_batch` waits for the reductions that its backwards launch."""
        batch.begin()
        self.tokens.is_of_batch = True  # buckets on the wire have no gradients, which does not end the window
        self.tokens.drop()

    def finish_batch(
        self, batch: DeferredBatch, copies: ModelGroup
    ) -> tuple[BufferLayout | None, MegastrategyError | None]:
        """As :meth:`finish_grad_sync`, also if no backward has reached this rank, which then sends zeros.

        Returns also the error with which all data-parallel ranks reject the gradients, if they do.
        """
        batch.is_open = False
        self._has_local_grads |= bool(self.buffers.params)
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
                f"parameter {self._layout.params[index].name!r}: a second gradient arrived in one backward after "
                f"bucket {bucket} had been launched (a second backward inside the first, or a layer used by two "
                "re-entrant checkpoints). Leave find_unused_parameters on and static_graph off, so that the ranks "
                "can agree to reduce the bucket again, or use checkpoint(use_reentrant=False)"
            )
        self._late.add(index)
        if self._planner is not None:
            self._planner.record_arrival(index)

    # --- averages by tokens ------------------------------------------------------------------------------------------

    def count_losses(self) -> LossTokens:
        """Returns the window that counts losses.

        Raises:
            LossTokensError: if the ranks do not exchange anything any more and could not learn of it; and outside of a
                batch, if the model's losses are inside of batches.
        """
        if self.batch is not None and not self.batch.is_open:
            raise LossTokensError(self.batch.why_not_counted)
        if not (self.tokens.is_used or self._must_agree() or not self._has_agreed or self._collectives.size == 1):
            raise LossTokensError(TOO_LATE)
        return self.tokens.begin_use(is_open=self._has_local_grads or not self._ends_window)

    # --- reduction ---------------------------------------------------------------------------------------------------

    @property
    def has_local_grads(self) -> bool:
        """Whether gradients have accumulated, and none of them was sent."""
        return self._has_local_grads and not self._launched.num

    def finish_grad_sync(self, copies: ModelGroup | None = None) -> BufferLayout | None:
        """Reduces accumulated gradients and waits; after a synchronised backward there is nothing to do.

        Collective: all ranks call it in the same state, after the same number of synchronised backwards.

        Args:
            copies: adds up the gradients of parameters that other stages have as well.

        Returns:
            The layout to move to now, the same on all ranks; None to keep the present one.

        Raises:
            CollectiveError: if a reduction failed, most often because another rank ended.
            UnusedParameterError: if a parameter has no gradient although the configuration promises one.
        """
        self._include_unprepared()
        if not self._has_local_grads:
            self.tokens.finish(self._collectives, self._tensor_ranks)  # for pooled gradients, which are reduced already
            return None
        # Not final: pooled gradients of a backward under no_sync(), unless a step reduces them.
        is_final = self._ends_window or not (self._is_unfinished and self.buffers.reduces_every_backward)
        self._used.check_promises(self.buffers, self._collectives.rank)
        self._is_unfinished, copies = True, copies or ModelGroup()
        while self._launched.num < len(self._layout.buckets):  # all ranks launch all buckets
            self._launch(self._launched.num)
        emit(self._listener, EventKind.WAIT_START, 0)
        self._phase = BackwardPhase.WAITING
        try:
            with profiler_range("wait for gradients"):
                # Before gradients are published: .grad depends on the parameters that other ranks used.
                try:
                    late_buckets, moves = self._agree()
                except MegastrategyError as error:
                    if self.across is not None and isinstance(error, CollectiveError):
                        self.across.replicas.close()  # other replicas wait until this one ends
                    # The ranks with copies wait for this one, and learn of the error afterwards.
                    copies.agree_on_copies(self.buffers.params, list(self.buffers.has_grad))
                    copies.add_up_copies(self.buffers.params, self.buffers.local_bucket_of)
                    raise
                for index, used in enumerate(self.buffers.has_grad):
                    self.num_reductions[index] += used
                copies.agree_on_copies(self.buffers.params, self.buffers.has_grad)
                for bucket in self._launched.wait():
                    self._late.detach(self._layout.buckets[bucket], self.buffers)
                    self.buffers.publish(bucket)
                for bucket in late_buckets:
                    self._reduce_again(bucket)
                copies.add_up_copies(self.buffers.params, self.buffers.local_bucket_of)
                if is_final:
                    self.tokens.finish(self._collectives, self._tensor_ranks)
            self._used.note_reduced(self.buffers.has_grad)
        finally:
            self._phase = BackwardPhase.IDLE
            emit(self._listener, EventKind.WAIT_END, 0)
            self._late.clear()
            self._nonfinite.clear()
            self._has_local_grads = False
        if self.across is not None:
            self.across.finish()
        planner, self._planner = self._planner, None
        # Gradients are final and nothing is on the wire: the only moment at which all ranks can move.
        wanted = planner.finish(self._layout, moves=moves) if planner is not None else None
        self.tokens.remember(is_final=is_final)
        self._is_unfinished = False
        return wanted

    def is_local(self, index: int) -> bool:
        """Whether the parameter has a gradient of a backward that no forward prepared, on this rank only."""
        return index in self._unprepared and has_unreduced(self.buffers.params[index])

    def _include_unprepared(self) -> None:
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
        while (bucket := self._launched.num) < len(self._missing) and self._missing[bucket] == 0:
            # Hazard: a backward of divided experts exchanges tokens. A rank that waits here for a bucket of a rank
            # whose experts got none, and whose bucket follows its backward, would keep that rank waiting for tokens.
            if not self._launched.has_space_for(bucket, self.buffers) and len(self._layout.domains) > 1:
                return
            self._launch(bucket)

    def _launch(self, bucket: int) -> None:
        with profiler_range("reduce", bucket):
            # Other buffers notice a drop themselves: a view still has the gradient.
            if self.buffers.reduces_every_backward and inside_backward():
                for index in self._layout.buckets[bucket].params:
                    if self.buffers.params[index].grad is None and self._used.has_arrived(index):
                        raise stepped_in_backward(self._layout.params[index].name)
            self.buffers.seal(bucket)
            if self._config.check_for_nan_in_grad:
                self.buffers.find_nonfinite(bucket, self._nonfinite)
            self._launched.launch(bucket, self.buffers)

    def _agree(self) -> tuple[list[int], bool]:
        """Sets ``has_grad`` of the parameters that any rank used.

        Returns the buckets in which any rank has late gradients, and whether any rank wants another order of buckets.

        Raises, on all ranks alike:
            MicrobatchMismatchError: if the ranks are not at the same microbatch.
            NonFiniteGradError: if any rank had a gradient that is not finite, and the configuration checks it.
            LossTokensError: if only some losses were counted by tokens.
            LayoutMismatchError: if the ranks have stepped with different options.
        """
        options, self.stepped_options = self.stepped_options, []
        agrees = self._used.are_exchanged
        has_grad = self.buffers.has_grad
        # With a static graph gradients are published for all parameters that any rank used in its first backward: a
        # rank without a gradient gets the mean as well.
        if not agrees and self._used.of_static_graph is not None:
            has_grad[:] = self._used.of_static_graph
        planner = self._planner
        wants = planner is not None and planner.wants_other_order(
            self._layout, self._late.deferred, self._used.is_needed
        )
        # Either all ranks exchange or none does, so this depends only on facts that are the same on all ranks. Whether
        # losses are counted by tokens is the same only after an exchange, so the first backward has one.
        if not (self._must_agree() or planner is not None or self.tokens.is_used or not self._has_agreed):
            return [], False
        used = self._used.unreduced(self.buffers)
        # With the count, so that different options with the same last bits are noticed at another time. Not with
        # replicas: one that came back has counted less.
        self._num_agreements += 1
        comparable = [option if option == option else () for option in options]  # each NaN has a hash of its own
        digest = hash((*comparable, self._num_agreements)) if self.across is None else 0
        late_buckets = {self._bucket_of[index] for index in self._late.params}
        if self._config.check_for_nan_in_grad:
            part_of = self.buffers.local_parts.local_view
            late = {index: part_of(late_grad(self.buffers.params[index])) for index in self._late.params}
            self._nonfinite.check_grads(late, self._layout)
        agreement = Agreement(
            used=list(has_grad),
            late=[bucket.index in late_buckets for bucket in self._layout.buckets],
            microbatch=self.microbatch + digest,
            has_nonfinite=bool(self._nonfinite.found()),
            wants_other_order=wants,
            counting=self.tokens.counting,
            others=[] if self.across is None else [self.across.replicas.wants_stop],
        ).over_ranks(self._collectives, self._tensor_ranks)
        if self.across is not None:
            self.buffers.zeroed.difference_update(index for index, is_used in enumerate(used) if is_used)
            counts = agreement.counting == (True, False)
            sums = self.tokens.sums(self._collectives, self._tensor_ranks) if counts else (0.0, 0)
            agreement, self.tokens.totals = self.across.settle(agreement, sums)
        if agreement.is_refused:
            found = self._nonfinite.found()
            own = Reasons(self._nonfinite.rank, self.microbatch, found, self.tokens.state, options)
            self.drop_unfinished()  # otherwise non-finite numbers would stay in the sums of shards
            raise agreement.refusal(own, self._collectives, self._tensor_ranks)
        self._has_agreed = True
        self.tokens.learn(are_counted=agreement.counting[0])
        if not (agrees or self.across is not None):
            return [], agreement.wants_other_order
        has_grad[:] = agreement.used
        self._used.agree(has_grad, used)
        return [bucket for bucket, flag in enumerate(agreement.late) if flag], agreement.wants_other_order

    def _must_agree(self) -> bool:
        """Whether every synchronised backward ends with an exchange between ranks."""
        return self._used.are_exchanged or self._config.check_for_nan_in_grad or self.across is not None

    def _reduce_again(self, bucket: int) -> None:
        """Adds this rank's late gradients to a reduced bucket, and reduces it once more, as all ranks do."""
        buffers = self.buffers
        buffers.add_to_reduced(bucket, self._late.pop(self._layout.buckets[bucket]))
        buffers.seal(bucket)
        self._launched.reduce_again(bucket, buffers)
        buffers.publish(bucket)
