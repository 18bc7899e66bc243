"""Which backward of the wrapped module runs: which forwards have prepared it, its begin, its end, and its failure.

[Note: which graph]
A re-entrant checkpoint runs an inner graph, whose end is not the end of the backward. The outputs of a forward are in
the outermost graph: the first gradient that reaches one of them begins the backward, and queues its end there. torch
calls that end only if the backward does not raise. A backward that has raised is found by the next call of the model or
its optimizer, outside of any backward. If the next one is another backward (``loss.backward()`` is tried again), only a
weak reference to the queued end tells it from a graph inside of the running one: torch keeps the end alive only while
the backward runs.

[Note: which backward synchronises]
As in torch DDP it is the first backward after a forward of the wrapper that trains and ends outside ``no_sync``.
Further backwards until the next such forward do not synchronise. A backward that no forward of the wrapper prepared
(of the module itself for a saliency map, or of a loss for the second time) belongs to user code, perhaps on one rank
only: its gradients stay in ``.grad``, or in a stand-in, and nothing is sent. The next backward that is prepared, or a
sharded step, includes the gradients that are still there.

[Note: an error in user code]
Other ranks launch all buckets and wait for this one. So a forward or a backward that raised is ended by the next call
of the model or of its optimizer, which launches the remaining buckets and reports the failure. All ranks drop the
gradients of that batch, the others raise, and all may go on. A rank that makes no further call ends with its process,
and the collectives of the others fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from ..errors import BackwardFailedError, LossTokensError, MegastrategyError
from ..events import Event, EventKind, Listener, emit
from ..layout import BufferLayout
from ..module import GradAccumulators, GradHooks
from .bucket import Bucket, State
from .reduced_grad import NO_GRAPH_TASK, inside_backward, inside_node
from .reducer import REFUSALS, Reducer
from .tokens import TOO_LATE


@dataclasses.dataclass
class DeferredBatch:
    """A batch of several backwards whose reductions are waited for at its end, not at the end of a backward.

    Attributes:
        why_not_counted: the error message for a loss whose tokens are counted outside of a batch.
        num_losses: their number, by which each is divided.
        is_open: whether a batch has begun.
        has_synced: whether one of its backwards was synchronised, and more may follow.
        refusal: the first error with which all data-parallel ranks rejected one of its backwards.
    """

    why_not_counted: str
    num_losses: int = 1
    is_open: bool = False
    has_synced: bool = False
    refusal: MegastrategyError | None = None

    def begin(self) -> None:
        """Begins a new batch."""
        self.is_open = True
        self.has_synced = False
        self.refusal = None


class BackwardTracker:
    """Tells the reducer when a backward begins, what arrives in it, when it ends, and whether it has failed.

    Args:
        reducer: has the plan, if any, and the buckets.
        hooks: of the reducer's parameters; they call this object.
        num_ranks: of the data-parallel ranks.
        should_sync: called when a backward begins, with the decision of the forwards before it.
        engine: has this object; a module that is wrapped again closes it.

    Attributes:
        batch: None unless reductions are waited for at the end of a batch of several backwards.
    """

    def __init__(
        self,
        reducer: Reducer,
        hooks: GradHooks,
        num_ranks: int,
        should_sync: Callable[[bool | None], bool],
        listener: Listener | None,
        engine: weakref.ref[Any],
    ) -> None:
        self.engine = engine
        self.batch: DeferredBatch | None = None
        self._reducer = reducer
        self._hooks = hooks
        self._accumulators = GradAccumulators()
        self._num_known = 0
        self._num_ranks = num_ranks
        self._should_sync = should_sync
        self._listener = listener
        # The forwards since the last synchronised backward: whether one trained outside of no_sync, and inside of it;
        # whether one is running that runs its backwards itself (Lightning's manual optimization); torch's number of the
        # backward that the last one ran in; and that of a backward in which a synchronised one has ended, the rest of
        # which is synchronised as well.
        self._has_synced_forward = False
        self._has_other_forward = False
        self._is_inside_forward = False
        self._graph = NO_GRAPH_TASK
        self._spent_in = NO_GRAPH_TASK
        # The running backward, or one that has raised.
        self._is_running = False
        self._end_of_backward: weakref.ref[Callable[[], None]] = weakref.ref(_ended)
        self._is_syncing = False
        self._ends_window = False  # not with pooled gradients under no_sync
        self._failure: str | None = None  # of a synchronised forward or backward that raised
        # The batch.
        self._num_arrivals_before = 0  # those of earlier backwards of the batch
        self._refusal: MegastrategyError | None = None  # of a backward of the batch, with pooled gradients
        self._is_batch_unfinished = False  # from its first backward until its reductions have ended
        self._is_unreduced = False  # after a backward of pooled gradients in a batch, which the next one waits for
        self._include()

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _include(self) -> None:
        """Registers the hooks of new parameters."""
        joined = self._reducer.params[self._num_known :]
        self._num_known += len(joined)
        self._accumulators.extend(joined)
        self._set_hooks()

    def extend(self, layout: BufferLayout) -> None:
        """Includes parameters that were appended to the reducer's, by a layout with buckets of their own."""
        self._reducer.extend(layout)
        self._include()

    def _set_hooks(self) -> None:
        this = weakref.ref(self)  # weak in hooks: a model that is never closed is freed
        reducer = self._reducer
        if reducer.memory is None:
            hooks = [_recording_hook(this, index) for index in range(len(reducer.params))]
        else:
            by_index = {
                index: _bucket_hook(this, bucket, place)
                for bucket in reducer.buckets
                for place, index in enumerate(bucket.plan.params)
            }
            hooks = [by_index[index] for index in range(len(reducer.params))]
        if self._listener is not None:
            hooks = [_reporting_hook(hook, index, self._listener) for index, hook in enumerate(hooks)]
        if reducer.main_grads is not None:
            hooks = [reducer.main_grads.hook(index, hook) for index, hook in enumerate(hooks)]
        self._hooks.set(hooks, this)

    def make_plan(self) -> None:
        """Makes the plan in the order of registration, if there is none: a step without a synchronised backward, or a
        method of the optimizer, comes before the first one. All ranks call this."""
        if self._reducer.memory is None:
            self._reducer.plan_as_registered()
            self._set_hooks()

    def _plan_as_seen(self) -> None:
        if self._reducer.memory is None:
            self._reducer.plan_as_seen()
            self._set_hooks()

    def close(self, *, keeps_grads: bool) -> None:
        """Removes the hooks, without waiting for reductions: after an error on another rank they might never end.

        ``keeps_grads``: see :meth:`.Reducer.release`.
        """
        self._reducer.abort_unfinished()
        self._hooks.remove()
        self._accumulators.drop()
        self._reducer.release(keeps_grads=keeps_grads)

    # --- forward ------------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Called before a forward that trains."""
        self.recover()
        if self._reducer.replicas is not None:
            self._reducer.replicas.hook.begin()
        self._accumulators.update_stream()

    def after_forward(self, outputs: Any, *, syncs: bool) -> None:
        """Called after a forward that trains; ``syncs``: whether its backward is synchronised."""
        self._failure = None  # of a forward inside of this one
        self._graph = torch._C._current_graph_task_id()
        if self._spent_in not in (NO_GRAPH_TASK, self._graph):  # that backward is over, as with gradient caching
            self._forget_forwards()
        if syncs:
            self._has_synced_forward = True
        else:
            self._has_other_forward = True
        if self._graph == NO_GRAPH_TASK:  # the outputs of a checkpoint's forward are in an inner graph: it ends early
            self.watch(outputs)

    def prepare(self, outputs: Any, *, syncs: bool) -> None:
        """Prepares the next backward, which starts from tensors in ``outputs``, to be synchronised or not."""
        self._replace_forwards(syncs=syncs)
        self.watch(outputs)

    def prepare_for_backward(self, _: Any) -> None:
        """The next backward is synchronised, but not under ``no_sync``, where torch's pipelining calls this, too."""
        self.before_forward()
        self._replace_forwards(syncs=self.would_sync)

    def forward_failed(self, error: BaseException, *, syncs: bool) -> None:
        """Called when a forward that trains has raised; see [Note: an error in user code]."""
        if self.batch is not None and not self._is_batch_unfinished:
            return  # all stages have refused it before its first backward, or its reductions have ended
        if (syncs or self._reducer.layout.is_pooled) and self._num_ranks > 1 and not inside_backward():
            self._failure = f"{type(error).__name__}: {error}"

    def watch(self, outputs: Any) -> None:
        """Begins the next backward at tensors in ``outputs``."""
        for output in _backward_starts(outputs):
            output.register_hook(self._on_output_grad)

    @contextlib.contextmanager
    def backwards_inside_forward(self) -> Iterator[None]:
        """Counts every backward in the block as prepared; afterwards none is."""
        self._is_inside_forward = True
        try:
            yield
        finally:
            self._is_inside_forward = False
            self._forget_forwards()

    @property
    def would_sync(self) -> bool:
        """Whether a backward inside of a forward would be synchronised now."""
        return self._should_sync(None)

    @property
    def _is_prepared(self) -> bool:
        return self._has_synced_forward or self._has_other_forward or self._is_inside_forward

    def _replace_forwards(self, *, syncs: bool) -> None:
        """Sets the decision for the next backward, whatever the forwards before it."""
        self._has_synced_forward = syncs
        self._has_other_forward = not syncs

    def _forget_forwards(self) -> None:
        self._has_synced_forward = self._has_other_forward = False
        self._spent_in = NO_GRAPH_TASK

    # --- a backward ---------------------------------------------------------------------------------------------------

    def _on_output_grad(self, grad: Tensor) -> None:
        if not self._is_prepared:
            return
        if self._is_running and self._end_of_backward() is not None:
            return  # a second output of its graph, or a graph inside of it
        self._begin()
        if self._reducer.main_grads is not None:
            self._reducer.main_grads.begin()

    def _begin(self) -> None:
        reducer = self._reducer
        is_pooled = reducer.layout.is_pooled
        # None if a forward runs its backwards itself: it is decided now.
        decision = None if self._is_inside_forward else self._has_synced_forward
        if self._is_running:
            self._end_failed()
        self._failure = None  # this rank has a backward all the same, of an earlier forward
        if self._is_unreduced:
            self._finish_one_of_batch()
        self._is_running = True
        self._is_batch_unfinished = self._is_in_batch
        self._ends_window = self._should_sync(decision)
        self._is_syncing = self._ends_window or is_pooled
        self._hooks.begin_backward()
        reducer.check_params()
        if not self._is_in_batch:
            reducer.tokens.begin_backward(reducer.num_steps)
        if self._is_in_batch and not is_pooled:
            self._num_arrivals_before = len(reducer.arrivals)
            reducer.open(reducer.num_launched)
        else:
            reducer.arrivals.clear()
            reducer.open()

        def end() -> None:
            self._end()

        self._end_of_backward = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        emit(self._listener, EventKind.BACKWARD_START, 0)

    def on_recorded(self, index: int) -> None:
        """Called by the hook of a parameter before there is a plan."""
        if not self._is_running and not self._begin_at_param():
            return
        self._reducer.check_users_hooks((index,))
        self._reducer.arrivals.append(index)

    def _begin_at_param(self) -> bool:
        """Begins a prepared backward at no known output; returns whether it is one."""
        if self._reducer.main_grads is not None:
            self._reducer.main_grads.check_begun()
        if not self._is_prepared:
            self._reducer.tokens.note_unprepared()
            return False
        self._begin()
        return True

    def on_unexpected(self, bucket: Bucket, place: int) -> None:
        """Called by the hook of a parameter whose gradient its bucket does not wait for."""
        if self._is_running:
            if bucket.state is State.IN_FLIGHT or bucket.state is State.REDUCED:
                self._reducer.note_late(bucket, place)
            return  # otherwise autograd has added it to the first one
        if not self._begin_at_param():
            self._reducer.note_unprepared(bucket)
            return
        bucket.waiting.discard(place)
        if not bucket.waiting:
            self.on_complete(bucket)

    def on_complete(self, bucket: Bucket) -> None:
        """Called by the hook that has removed the last place from ``bucket.waiting``."""
        if not self._is_syncing:
            self._reducer.check_users_hooks(bucket.plan.params)
            bucket.accumulate()
        else:
            self._reducer.launch_complete()

    def _end(self) -> None:
        reducer = self._reducer
        self._is_running = False
        if reducer.main_grads is not None:
            reducer.main_grads.end()
        if not reducer.has_arrived():
            reducer.cancel()  # torch.autograd.grad of inputs: no parameter has got a gradient
            return
        reducer.tokens.end_backward()
        if self._is_syncing:
            if inside_node():  # another backward around it continues
                self._spent_in = self._graph
            else:
                self._forget_forwards()
        if self._is_syncing and not self._is_in_batch:
            self._finish()
        elif reducer.layout.is_pooled:
            self._is_unreduced = True
        else:
            if self._is_in_batch and not self._is_syncing:
                del reducer.arrivals[self._num_arrivals_before :]  # the plan follows the last backward of each stage
            reducer.accumulate()
        emit(self._listener, EventKind.BACKWARD_END, int(self._is_syncing))

    @torch.no_grad()
    def _finish(self) -> None:
        """Reduces all gradients that are not reduced, and waits. Collective."""
        reducer = self._reducer
        self._is_unreduced = False
        reducer.is_finishing = True
        self._plan_as_seen()
        reducer.finish(ends_window=self._ends_window, failure=self._failure, ends_batch=not self._is_batch_unfinished)

    # --- a batch of several backwards ---------------------------------------------------------------------------------

    @property
    def _is_in_batch(self) -> bool:
        return self.batch is not None and self.batch.is_open

    def begin_batch(self, batch: DeferredBatch) -> None:
        """Drops all gradients, and begins a batch.

        The reductions that its backwards launch are waited for in :meth:`finish_batch`, not at the end of a backward.
        Each stage of a rank synchronises its last backward; those of other stages may follow, and accumulate while the
        first buckets are on the wire.
        """
        self._reducer.drop()
        batch.begin()
        self._reducer.tokens.announced.clear()
        self._is_batch_unfinished = False
        self._refusal = None
        self._reducer.arrivals.clear()
        self._reducer.open()

    def finish_batch(self, batch: DeferredBatch) -> MegastrategyError | None:
        """Waits for the reductions, also if no backward has reached this rank, which then sends zeros. Collective.

        Returns the error with which all data-parallel ranks reject the gradients, if they do.
        """
        batch.is_open = False
        self._is_batch_unfinished = False
        self._ends_window = True
        refusal = self._finish_or_refuse()  # also after one: stages with copies of parameters wait for this rank
        return self._refusal or refusal

    def _finish_one_of_batch(self) -> None:
        """Reduces a backward of pooled gradients: they cannot accumulate on this rank."""
        self._refusal = self._finish_or_refuse() or self._refusal

    def _finish_or_refuse(self) -> MegastrategyError | None:
        try:
            self._finish()
        except REFUSALS as refusal:
            return refusal
        return None

    def count_loss(self, num_tokens: float) -> None:
        """Notes the tokens of the loss whose backward comes next; in a batch, of one of its losses.

        Raises:
            LossTokensError: if the ranks do not exchange anything any more and could not learn of it; and outside of a
                batch, if the model's losses are inside of batches.
        """
        if self.batch is not None and not self.batch.is_open:
            raise LossTokensError(self.batch.why_not_counted)
        if not (self._reducer.must_agree or self._num_ranks == 1):
            raise LossTokensError(TOO_LATE)
        num_losses = 1 if self.batch is None else self.batch.num_losses
        self._reducer.tokens.announce(num_tokens / num_losses, in_batch=self._is_in_batch)

    # --- around backwards ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish_local(self) -> None:
        """Reduces gradients that have accumulated without a reduction. Collective if there are any."""
        self.recover()
        reducer = self._reducer
        self._ends_window = True
        if reducer.has_local_grads:
            self._plan_as_seen()
            reducer.open()
            self._finish()
        elif reducer.layout.is_pooled and not reducer.tokens.is_final:  # reduced already, under no_sync
            reducer.finish_window(is_counted=reducer.tokens.is_used)

    def recover(self) -> None:
        """Ends a forward or a backward that has raised; see [Note: an error in user code]."""
        if self._failure is not None and not inside_backward():
            self._end_failed()
        else:
            self._recover_backward()

    def _recover_backward(self) -> None:
        # Its end was not called, and no backward runs now.
        if (self._is_running or self._reducer.is_finishing) and not inside_backward():
            self._end_failed()

    @torch.no_grad()
    def _end_failed(self) -> None:
        reducer = self._reducer
        is_syncing = self._failure is not None or reducer.is_finishing or self._is_syncing
        if not (self._is_running or reducer.is_finishing or self._is_batch_unfinished):  # a forward has raised
            reducer.open()
        self._is_running = False
        if reducer.main_grads is not None:
            reducer.main_grads.end()
        self._forget_forwards()
        if not is_syncing:
            reducer.accumulate()
            return
        self._failure = self._failure or "its backward raised"
        self._is_batch_unfinished = False
        reducer.drop_unlaunched()
        try:
            with contextlib.suppress(BackwardFailedError):  # user code has seen this rank's exception
                self._finish()
        finally:
            self._failure = None
            reducer.is_finishing = False
            reducer.drop()

    def clear(self, params: Sequence[Parameter]) -> None:
        """Drops the gradients of these parameters."""
        self._recover_backward()  # one of an earlier forward may come after a forward that raised
        self._reducer.clear(params)

    def zero(self, params: Sequence[Parameter]) -> None:
        """Zeroes the gradients of these parameters."""
        self._recover_backward()
        self._reducer.zero(params)


def _ended() -> None:
    """The end of a backward before there was one."""


def _backward_starts(outputs: Any) -> Iterator[Tensor]:
    """Yields the tensors in a forward's outputs, in containers and dataclasses too, that a backward may start from."""
    for leaf in tree_leaves(outputs):
        # A hook on a tensor without a graph raises; on a leaf it runs for the leaf's own gradient, which comes last.
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            yield leaf
        # For torch's pytree a dataclass is a leaf. Without its tensors a backward would seem to end with the inner
        # graph of a checkpoint.
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _backward_starts([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _recording_hook(this: weakref.ref[BackwardTracker], index: int) -> Callable[[Tensor], None]:
    def on_grad(_: Tensor) -> None:
        tracker = this()
        if tracker is not None:
            tracker.on_recorded(index)

    return on_grad


def _bucket_hook(this: weakref.ref[BackwardTracker], bucket: Bucket, place: int) -> Callable[[Tensor], None]:
    waiting = bucket.waiting
    arrive = waiting.remove
    bucket_ref = weakref.ref(bucket)

    def on_grad(_: Tensor) -> None:
        try:
            arrive(place)
        except KeyError:
            tracker = this()
            late = bucket_ref()
            if tracker is not None and late is not None:
                tracker.on_unexpected(late, place)
            return
        if not waiting:
            tracker = this()
            complete = bucket_ref()
            if tracker is not None and complete is not None:
                tracker.on_complete(complete)

    return on_grad


def _reporting_hook(hook: Callable[[Tensor], None], index: int, listener: Listener) -> Callable[[Tensor], None]:
    def on_grad(param: Tensor) -> None:
        listener(Event(EventKind.GRAD_READY, index))
        hook(param)

    return on_grad
