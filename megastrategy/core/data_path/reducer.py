"""The reducer: one backward at a time, from its first gradient to the last reduced bucket.

[Note: when a bucket is launched]
Hooks remove the places of arrived gradients from the ``waiting`` set of their bucket. A complete bucket is launched
when all buckets before it have been launched, so every rank launches the same collectives in the same order, whatever
the order of its gradients. At the end of the outermost backward the remaining buckets are launched, the ranks agree on
the used parameters, and wait: gradients are final when ``backward()`` returns.

[Note: which graph]
A re-entrant checkpoint runs an inner graph, whose end is not the end of the backward. The outputs of a forward are in
the outermost graph: the first gradient that reaches one of them begins the backward, and queues its end there. torch
keeps the callback of that end alive only while the backward runs, so a weak reference tells whether an earlier backward
has raised.

[Note: why a late gradient is not lost]
A parameter of two re-entrant checkpoints gets its gradient in two parts, and no set can know this in advance. If the
second part arrives when the bucket is on the wire, autograd stores it in a tensor of its own, since ``Bucket.seal`` has
set ``.grad`` to None. The ranks agree that the bucket is late, and reduce it once more with the second part added. From
then on this rank launches the bucket only at the end of backward.

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
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ..collectives import Collectives
from ..config import DistributedDataParallelConfig
from ..errors import (
    BackwardFailedError,
    BucketInFlightError,
    LayoutMismatchError,
    LossTokensError,
    MegastrategyError,
    MicrobatchMismatchError,
    NonFiniteGradError,
    ParameterChangedError,
    UnusedParameterError,
)
from ..events import Event, EventKind, Listener, emit, profiler_range
from ..layout import SIXTEEN_BIT_DTYPES, BufferLayout, Domain
from ..module import GradAccumulators, LocalParts, ModelParallel
from .agreement import Agreement, Reasons, name_of_rank
from .bucket import Bucket, State, get_grad, requires_grad, set_grads, widen_grads
from .flattened import FlattenedBucket
from .main_grads import MainGrads, has_main_grad
from .memory import Memory
from .nonfinite import FiniteCheck
from .param_buffers import check_unchanged
from .plan import plan_as_seen
from .pooled import PooledBucket
from .preparation import DeferredBatch, Preparation, backward_starts
from .reduced_grad import NO_GRAPH_TASK, ReducedGrad, inside_backward, inside_node, late_grad
from .replica_hook import HookQueue, ReplicaHook
from .tokens import TOO_LATE, TokenWindow

_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")
_REFUSALS = (
    BackwardFailedError,
    LayoutMismatchError,
    LossTokensError,
    MicrobatchMismatchError,
    NonFiniteGradError,
)
"""The errors that all data-parallel ranks raise alike in a backward."""
_dtype = operator.attrgetter("dtype")
_version = operator.attrgetter("_version")


class Reducer:
    """Reduces the gradients of one wrapped module.

    Args:
        layout: the plan in the order of registration, in whose order ``params`` are.
        parts, model: where this rank has the parameters, and the groups of ranks that share the model with it.
        ranks: all data-parallel ranks, which agree at the end of a backward.
        ranks_of: returns those that reduce a domain's buckets.
        should_sync: called when a backward begins, with the decision of the forwards before it.
        engine: has this object; a module that is wrapped again closes it.

    Attributes:
        layout: the plan; in the order seen, after the first synchronised backward.
        memory, buckets: None and empty until then.
        microbatch: the number of the microbatch, if the training loop counts them.
        stepped_options: the options of the steps since the last agreement, which all ranks share.
        num_reductions: the synchronised backwards so far.
        batch: None unless reductions are waited for at the end of a batch of several backwards.
        num_steps: the steps so far of all optimizers.
        shown: every ``.grad`` when the last reduction ended, in launch order; the same object while they stay.
        tokens: the window of losses that are weighed by tokens.
        replicas: calls the hook of other replicas; None without.
        drops_step: whether replicas have dropped the last batch, which no optimizer steps.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: list[Parameter],
        parts: LocalParts,
        model: ModelParallel,
        config: DistributedDataParallelConfig,
        ranks: Collectives,
        ranks_of: Callable[[Domain], Collectives],
        device: torch.device,
        should_sync: Callable[[bool | None], bool],
        listener: Listener | None,
        all_reduce_option: str,
        engine: weakref.ref[Any],
    ) -> None:
        self.engine = engine
        self._this = weakref.ref(self)  # weak in hooks: a model that is never closed is freed
        self.layout = layout
        self.params = params
        self.memory: Memory | None = None
        self.buckets: list[Bucket] = []
        self.microbatch = 0
        self.stepped_options: list[float] = []
        self.num_reductions = 0
        self.num_steps = 0
        self.shown: list[Tensor | None] = []
        self._is_settled = False  # since the last reduction no backward has begun, and nothing was dropped
        self._ordered: list[Parameter] = []  # in launch order
        self._required = b""  # a byte for each of them: requires_grad when the last backward began
        self.tokens = TokenWindow(params)
        self.replicas: HookQueue | None = None
        self.drops_step = False
        self._parts = parts
        self._model = model
        self._config = config
        self._ranks = ranks
        self._ranks_of = ranks_of
        self._device = device
        self._should_sync = should_sync
        self._listener = listener
        self._all_reduce_option = all_reduce_option
        self._prepared = Preparation()
        self.batch: DeferredBatch | None = None
        self._has_pooled_experts = False
        self._num_arrivals_before = 0  # those of earlier backwards of the batch
        self._refusal: MegastrategyError | None = None  # of a backward of the batch, with pooled gradients
        self._is_batch_unfinished = False  # from its first backward until its reductions have ended
        self._is_running = False
        self._is_syncing = False
        self._is_unreduced = False  # after a backward of pooled gradients in a batch, which the next one waits for
        self._ends_window = False  # not with pooled gradients under no_sync
        self._num_launched = 0
        self._task = NO_GRAPH_TASK  # torch's number of the graph at whose end the backward ends
        self._end_of_backward: weakref.ref[Callable[[], None]] = weakref.ref(_ended)
        self._failure: str | None = None  # of a synchronised forward or backward that raised
        self._is_finishing = False  # from the end of a synchronised backward until its gradients are final, or dropped
        self._arrivals: list[int] = []
        self._has_agreed = False  # on the parameters of a static graph
        self._static_used = b""
        self._static_missing = b""
        self._num_agreements = 0
        self._name = name_of_rank(ranks, model.tensor_ranks)
        self._nonfinite: FiniteCheck | None = None
        if config.check_for_nan_in_grad:
            self._nonfinite = FiniteCheck(
                self._name, lambda device: ranks.wait_for_device(device, "a collective before check_for_nan_in_grad")
            )
        self._handles: list[RemovableHandle] = []
        self._hooks: list[Callable[[Tensor], None]] = []
        self._num_hooks = 0
        self._versions: list[int] = []  # of the parameters when a backward began, if user code has hooks
        self._dtypes: list[torch.dtype] = []
        self._swap_guards: list[weakref.ref[Parameter]] = []
        self._num_known = 0
        self._accumulators = GradAccumulators()
        self._main_grads: MainGrads | None = None  # if layers add gradients themselves
        self._include(layout)

    def _include(self, layout: BufferLayout) -> None:
        """Prepares the parameters beyond the known ones, and registers the hooks of all."""
        self.layout = layout
        for param, spec in zip(self.params[self._num_known :], layout.params[self._num_known :], strict=True):
            if spec.dtype in SIXTEEN_BIT_DTYPES and spec.grad_dtype != spec.dtype:
                param.grad_dtype = None  # ``.grad`` may be a view of an fp32 buffer
            if self._parts.local_view(param) is param:
                # torch.utils.swap_tensors refuses a tensor to which a weak reference exists; without it the parameter
                # would lose its hook.
                self._swap_guards.append(weakref.ref(param))
        keeps_grads = self._bucket_class is Bucket
        if self._main_grads is None and any(map(has_main_grad, self.params[self._num_known :])):
            self._main_grads = MainGrads(self._parts)
        if self._main_grads is not None:
            self._main_grads.include(layout, self.params, self._num_known, have_place=keeps_grads)
        self._accumulators.extend(self.params[self._num_known :])
        self._num_known = len(self.params)
        self._dtypes = [spec.dtype for spec in layout.params]
        self._make_hooks()

    def extend(self, layout: BufferLayout) -> None:
        """Includes parameters that were appended to ``params``, with buckets of their own behind the present ones."""
        num_buckets = len(self.layout.buckets)
        self.layout = layout
        if self.memory is not None:
            self.memory.extend(layout, self.params)
            self.buckets += [self._make_bucket(layout, number) for number in range(num_buckets, len(layout.buckets))]
        self._has_agreed = False
        self._is_settled = False
        self._set_order()
        self._include(layout)
        if self.memory is not None:
            self._place_main_grads()

    def _set_order(self) -> None:
        self._ordered = [param for bucket in self.buckets for param in bucket.params]
        self._required = b""

    def _place_main_grads(self) -> None:
        if self._main_grads is None:
            return
        assert self.memory is not None
        slots = self.layout.slots
        self._main_grads.place(self.memory.grad_views, lambda index: self.buckets[slots[index].bucket])

    def _make_bucket(self, layout: BufferLayout, number: int) -> Bucket:
        assert self.memory is not None
        plan = layout.buckets[number]
        return self._bucket_class(
            plan,
            self.memory,
            self.params,
            self._parts,
            self._ranks_of(plan.domain),
            self._ranks.rank,
            1.0 / self._ranks.size,
            self._all_reduce_option,
            self._listener,
            self.replicas,
        )

    def set_replica_hook(self, hook: ReplicaHook) -> None:
        """Calls ``hook`` from now on.

        Raises:
            ValueError: if there is a plan: the buckets of replicas are in the order of registration.
        """
        if self.memory is not None or self.replicas is not None:
            raise ValueError("set_replica_hook(): call it once, before the first backward of the wrapped model")
        if any(group.state is not None for group in self._model.groups):
            raise ValueError("set_replica_hook(): a pipeline's stages are not supported with replicas")
        self.replicas = HookQueue(hook, self._device)

    @property
    def _bucket_class(self) -> type[Bucket]:
        if self.layout.is_pooled:
            return PooledBucket
        return Bucket if self._config.use_contiguous_buffers else FlattenedBucket

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _make_hooks(self) -> None:
        this = self._this
        if self.memory is None:
            hooks = [_recording_hook(this, index) for index in range(len(self.params))]
        else:
            by_index = {
                index: _bucket_hook(this, bucket, place)
                for bucket in self.buckets
                for place, index in enumerate(bucket.plan.params)
            }
            hooks = [by_index[index] for index in range(len(self.params))]
        if self._listener is not None:
            hooks = [_reporting_hook(hook, index, self._listener) for index, hook in enumerate(hooks)]
        if self._main_grads is not None:
            hooks = [self._main_grads.hook(index, hook) for index, hook in enumerate(hooks)]
        self._hooks = hooks
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Registers the hook of each parameter, or replaces the present one.

        Replaced, not registered anew: torch registers no hook on a parameter that is frozen for a while.
        """
        for hook in self._hooks:
            hook.megastrategy_reducer = self._this  # type: ignore[attr-defined]
        for handle, hooks, hook in zip(self._handles, map(_hooks_of, self.params), self._hooks, strict=False):
            hooks[handle.id] = hook
        for param, hook in list(zip(self.params, self._hooks, strict=True))[len(self._handles) :]:
            self._handles.append(param.register_post_accumulate_grad_hook(hook))
        self._num_hooks = self._count_hooks()

    def _move_hooks_to_end(self) -> None:
        """Moves the hooks behind those of user code, which may still change the gradient."""
        num_hooks = self._count_hooks()
        if num_hooks == self._num_hooks:
            return
        self._num_hooks = num_hooks
        for handle, hooks in zip(self._handles, map(_hooks_of, self.params), strict=True):
            # Removed and inserted: torch iterates over the plain dictionary, which move_to_end does not change.
            if next(reversed(hooks), None) != handle.id and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)

    def _count_hooks(self) -> int:
        return sum(map(len, filter(None, map(_hooks_of, self.params))))

    def remove_hooks(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def _has_users_hooks(self) -> bool:
        return self._num_hooks > len(self._handles)

    # --- forward ------------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Called before a forward that trains."""
        self.recover()
        if self.replicas is not None:
            self.replicas.hook.begin()
        self._accumulators.update_stream()

    def after_forward(self, outputs: Any, *, syncs: bool) -> None:
        """Called after a forward that trains; ``syncs``: whether its backward is synchronised."""
        self._failure = None  # of a forward inside of this one
        self._prepared.add(syncs=syncs)
        if not inside_backward():  # the outputs of a checkpoint's forward are in an inner graph, which ends too early
            self.watch(outputs)

    def prepare(self, outputs: Any, *, syncs: bool) -> None:
        """Prepares the next backward, which starts from tensors in ``outputs``, to be synchronised or not."""
        self._prepared.replace(syncs=syncs)
        self.watch(outputs)

    def prepare_for_backward(self, _: Any) -> None:
        """The next backward is synchronised, but not under ``no_sync``, where torch's pipelining calls this, too."""
        self.before_forward()
        self._prepared.replace(syncs=self.would_sync)

    def forward_failed(self, error: BaseException, *, syncs: bool) -> None:
        """Called when a forward that trains has raised; see [Note: an error in user code]."""
        if self.batch is not None and not self._is_batch_unfinished:
            return  # all stages have refused it before its first backward, or its reductions have ended
        if (syncs or self.layout.is_pooled) and self._ranks.size > 1 and not inside_backward():
            self._failure = f"{type(error).__name__}: {error}"

    def watch(self, outputs: Any) -> None:
        """Begins the next backward at tensors in ``outputs``."""
        for output in backward_starts(outputs):
            output.register_hook(self._on_output_grad)

    @contextlib.contextmanager
    def backwards_inside_forward(self) -> Iterator[None]:
        """Counts every backward in the block as prepared; afterwards none is."""
        self._prepared.inside_forward = True
        try:
            yield
        finally:
            self._prepared.inside_forward = False
            self._prepared.clear()

    @property
    def would_sync(self) -> bool:
        """Whether a backward inside of a forward would be synchronised now."""
        return self._should_sync(None)

    # --- a backward ---------------------------------------------------------------------------------------------------

    def _on_output_grad(self, grad: Tensor) -> None:
        if self._task != torch._C._current_graph_task_id() and self._prepared:
            if self._is_running and self._end_of_backward() is not None:
                return  # a graph inside of the running backward
            self._begin()
            if self._main_grads is not None:
                self._main_grads.begin()

    def _begin(self) -> None:
        decision = self._prepared.decision
        if self._is_running:
            self._end_failed()
        self._failure = None  # this rank has a backward all the same, of an earlier forward
        if self._is_unreduced:
            self._finish_one_of_batch()
        self._is_running = True
        self._is_batch_unfinished = self._is_in_batch
        self._ends_window = self._should_sync(decision)
        self._is_syncing = self._ends_window or self.layout.is_pooled
        self._has_pooled_experts = self.layout.is_pooled and len(self.layout.domains) > 1
        self._task = torch._C._current_graph_task_id()
        self._move_hooks_to_end()
        if list(map(_dtype, self.params)) != self._dtypes:
            self._check_unchanged()
        self._versions = list(map(_version, self.params)) if self._has_users_hooks else []
        self.tokens.begin_backward(self.num_steps)
        if self._is_in_batch and not self.layout.is_pooled:
            self._num_arrivals_before = len(self._arrivals)
            self._open(self.buckets[self._num_launched :])
        else:
            self._arrivals.clear()
            self._open_buckets()

        def end() -> None:
            self._end()

        self._end_of_backward = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        emit(self._listener, EventKind.BACKWARD_START, 0)

    def _check_unchanged(self) -> None:
        for param, spec in zip(self.params, self.layout.params, strict=True):
            check_unchanged(self._parts.local_view(param), spec)

    def _open_buckets(self) -> None:
        self._num_launched = 0
        self._open(self.buckets)

    def _open(self, buckets: Sequence[Bucket]) -> None:
        self._is_settled = False
        required = bytes(map(requires_grad, self._ordered))
        if required != self._required:
            self._required = required
            for bucket in self.buckets:
                bucket.update_awaited()
        has_grads = any(map(operator.is_not, map(get_grad, self._ordered), itertools.repeat(None)))
        for bucket in buckets:
            bucket.open(has_grads=has_grads)

    def on_recorded(self, index: int) -> None:
        """Called by the hook of a parameter before there is a plan."""
        if not self._is_running:
            if self._main_grads is not None:
                self._main_grads.check_begun()
            if not self._prepared:
                self.tokens.note_unprepared()
                return
            self._begin()
        self._check_users_hooks((index,))
        self._arrivals.append(index)

    def on_unexpected(self, bucket: Bucket, place: int) -> None:
        """Called by the hook of a parameter whose gradient its bucket does not wait for."""
        if not self._is_running:
            if self._main_grads is not None:
                self._main_grads.check_begun()
            if not self._prepared:
                bucket.has_unprepared = True
                self._is_settled = False
                self.tokens.note_unprepared()
                return
            self._begin()  # the graph began at no known output
            bucket.waiting.discard(place)
            if not bucket.waiting:
                self.on_complete(bucket)
        elif bucket.state is State.IN_FLIGHT or bucket.state is State.REDUCED:
            self._on_late(bucket, place)
        # Otherwise autograd has added it to the first one.

    def _on_late(self, bucket: Bucket, place: int) -> None:
        if not self._exchanges:
            raise BucketInFlightError(
                f"parameter {bucket.specs[place].name!r}: a second gradient arrived in one backward after bucket "
                f"{bucket.plan.index} had been launched (a second backward inside the first, or a layer used by two "
                "re-entrant checkpoints). Leave find_unused_parameters on and static_graph off, so that the ranks "
                "can agree to reduce the bucket again, or use checkpoint(use_reentrant=False)"
            )
        bucket.is_late = True

    def on_complete(self, bucket: Bucket) -> None:
        """Called by the hook that has removed the last place from ``bucket.waiting``."""
        if not self._is_syncing:
            self._check_users_hooks(bucket.plan.params)
            bucket.accumulate()
        elif self._config.overlap_grad_reduce:
            self._launch_complete()

    def _check_users_hooks(self, indices: Sequence[int]) -> None:
        """Raises ParameterChangedError if a hook of user code stepped a parameter, or dropped its gradient."""
        for index in indices if self._versions else ():
            param = self.params[index]
            if param.grad is None or param._version != self._versions[index]:
                raise _stepped_in_backward(self.layout.params[index].name)

    def _end(self) -> None:
        self._is_running = False
        if self._main_grads is not None:
            self._main_grads.end()
        self._task = NO_GRAPH_TASK
        if not self._has_arrived():
            self._close_buckets()  # torch.autograd.grad of inputs: no parameter has got a gradient
            return
        self.tokens.end_backward()
        if self._is_syncing:
            self._prepared.end(inside=inside_node())
        if self._is_syncing and not self._is_in_batch:
            self.finish()
        elif self.layout.is_pooled:
            self._is_unreduced = True
        else:
            if self._is_in_batch and not self._is_syncing:
                del self._arrivals[self._num_arrivals_before :]  # the plan follows the last backward of each stage
            self._accumulate()
        emit(self._listener, EventKind.BACKWARD_END, int(self._is_syncing))

    def _has_arrived(self) -> bool:
        if self.memory is None:
            return bool(self._arrivals)
        return any(len(bucket.waiting) != len(bucket.awaited) for bucket in self.buckets)

    def _close_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.waiting.clear()

    def _accumulate(self) -> None:
        for bucket in self.buckets:
            if bucket.state is State.OPEN:
                bucket.accumulate()
        if self.memory is None:
            widen_grads(self.params, self.layout.params)

    def _launch_complete(self) -> None:
        buckets = self.buckets
        while self._num_launched < len(buckets) and not buckets[self._num_launched].waiting:
            # Hazard: a backward of divided experts exchanges tokens. A rank that waits here for a bucket of a rank
            # whose experts got none, and whose bucket follows its backward, would keep that rank waiting for tokens.
            if self._has_pooled_experts and not buckets[self._num_launched].launches_at_once:
                return
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._num_launched]
        with profiler_range("reduce", bucket.plan.index):
            bucket.seal()
            self._check_arrived(bucket)
            if self._nonfinite is not None:
                bucket.check_finite(self._nonfinite)
            bucket.launch()
        self._num_launched += 1

    def _check_arrived(self, bucket: Bucket) -> None:
        """Raises ParameterChangedError if user code dropped a gradient, or stepped, inside of the backward."""
        if not (self._is_running and (self._versions or 0 in bucket.used)):
            return
        for place, index in enumerate(bucket.plan.params):
            if place in bucket.missing or not bucket.params[place].requires_grad:
                continue
            is_stepped = bool(self._versions) and self.params[index]._version != self._versions[index]
            if is_stepped or not bucket.used[place]:
                raise _stepped_in_backward(bucket.specs[place].name)

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
        self.drop()
        batch.begin()
        self.tokens.is_of_batch = True
        self._is_batch_unfinished = False
        self._refusal = None
        self._arrivals.clear()
        self._open_buckets()

    def finish_batch(self, batch: DeferredBatch) -> MegastrategyError | None:
        """As :meth:`finish`, also if no backward has reached this rank, which then sends zeros. Collective.

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
            self.finish()
        except _REFUSALS as refusal:
            return refusal
        return None

    # --- its end ------------------------------------------------------------------------------------------------------

    @property
    def _exchanges(self) -> bool:
        """Whether every synchronised backward ends with an exchange of the used parameters."""
        return (self._config.find_unused_parameters or self._config.static_graph) and not self._has_agreed

    @property
    def _must_agree(self) -> bool:
        # Whether losses are counted by tokens is the same on all ranks only after an exchange, so the first backward
        # has one.
        return self._exchanges or self._config.check_for_nan_in_grad or self.tokens.is_used or self.num_reductions == 0

    def count_losses(self) -> TokenWindow:
        """Returns the window that counts losses.

        Raises:
            LossTokensError: if the ranks do not exchange anything any more and could not learn of it; and outside of a
                batch, if the model's losses are inside of batches.
        """
        if self.batch is not None and not self.batch.is_open:
            raise LossTokensError(self.batch.why_not_counted)
        if not (self._must_agree or self._ranks.size == 1):
            raise LossTokensError(TOO_LATE)
        return self.tokens.begin_use()

    @torch.no_grad()
    def finish(self) -> None:
        """Reduces all gradients that are not reduced, and waits. Collective.

        Raises, on all ranks alike:
            MicrobatchMismatchError: if the ranks are not at the same microbatch.
            BackwardFailedError: if a forward or a backward has raised on another rank.
            NonFiniteGradError: if a gradient is not finite, and the configuration checks it.
            LossTokensError: if only some losses were counted by tokens.
            LayoutMismatchError: if the ranks have stepped with different options.
        """
        try:
            self._finish()
        except _REFUSALS:
            if self.replicas is not None:
                self.replicas.hook.commit(is_refused=True)
            raise
        if self.replicas is not None and self._ends_window:
            self.drops_step = not self.replicas.hook.commit(is_refused=False)
            grads = [grad for bucket in self.buckets for grad in bucket.final_grads()] if self.drops_step else []
            if grads:  # a sum that has failed may have left anything
                torch._foreach_zero_(grads)

    def _finish(self) -> None:
        self._is_unreduced = False
        self._is_finishing = True
        if self.memory is None:
            self._make_plan()
        while self._num_launched < len(self.buckets):
            self._launch_next()
        emit(self._listener, EventKind.WAIT_START, 0)
        try:
            with profiler_range("wait for gradients"):
                try:
                    agreed = self._with_replicas(self._agree())
                except MegastrategyError:
                    # The ranks with copies wait for this one, and learn of the error afterwards.
                    self._share_copies(bytes(len(self.params)))
                    raise
                self._wait_for_buckets()
        finally:
            emit(self._listener, EventKind.WAIT_END, 0)
        for number in [number for number, flag in enumerate(agreed.late) if flag]:
            self.buckets[number].reduce_again()
        used = self._share_copies(agreed.used)
        position = 0
        for bucket in self.buckets:
            end = position + len(bucket.params)
            bucket.publish(used[position:end])
            position = end
        self._is_finishing = False
        self.num_reductions += 1
        self.tokens.is_used |= agreed.counting[0]
        if self._ends_window:
            self._finish_window(is_counted=agreed.counting[0])
        else:  # pooled gradients under no_sync: buckets that were sent in backward had none at its end
            self.tokens.note_grads()
        if not self._config.use_contiguous_buffers:
            return  # ``.grad`` is autograd's own, whose memory ``shown`` would keep
        if not self._are_as_shown():
            self.shown = list(map(get_grad, self._ordered))
        self._is_settled = True

    @property
    def is_settled(self) -> bool:
        """Whether every ``.grad`` is what the last reduction has made it: nothing was added, written or dropped."""
        return self._is_settled and self._are_as_shown()

    def _are_as_shown(self) -> bool:
        # Three loops in C, before any use of gradients, instead of a few lines for every bucket.
        return len(self.shown) == len(self._ordered) and all(
            map(operator.is_, map(get_grad, self._ordered), self.shown)
        )

    def _wait_for_buckets(self) -> None:
        for bucket in self.buckets:
            if bucket.state is State.IN_FLIGHT:
                bucket.wait()

    def _finish_window(self, *, is_counted: bool) -> None:
        if is_counted:
            try:
                self.tokens.finish(self.buckets, self._ranks, self._model.tensor_ranks, self.replicas, self.num_steps)
            except LossTokensError:
                self.drop()
                raise
        else:
            self.tokens.end_window(self.num_steps)

    def _share_copies(self, used: bytes) -> bytes:
        """Adds up the reduced gradients of parameters that several stages have. Collective over these stages.

        ``used``, and the result: a byte for each parameter, in launch order, whether any rank has a gradient.
        """
        if self._is_batch_unfinished or not self.layout.has_copies:
            return used
        order = self.layout.param_order
        has_grad = [False] * len(order)
        for place, index in enumerate(order):
            has_grad[index] = bool(used[place])
        for group in self._model.groups:
            group.agree_on_copies(self.params, has_grad)
            group.add_up_copies(self.params, lambda index: self.buckets[self.layout.slots[index].bucket].reduced)
        return bytes(has_grad[index] for index in order)

    def _agree(self) -> Agreement:
        options = self.stepped_options
        self.stepped_options = []
        for bucket in self.buckets:
            if bucket.is_late:
                bucket.find_late()
                if self._nonfinite is not None:
                    late = [index for index in bucket.plan.params if self.params[index].grad is not None]
                    grads = {index: self._parts.local_view(late_grad(self.params[index])) for index in late}
                    self._nonfinite.check_grads(grads, self.layout)
        used = b"".join([bucket.used for bucket in self.buckets])
        if (self._config.static_graph or not self._config.find_unused_parameters) and self._failure is None:
            self._check_promises()
        if self._has_agreed and self._config.static_graph:
            used = self._static_used
        # With the count, so that different options with the same last bits are noticed at another time.
        self._num_agreements += 1
        comparable = [option if option == option else () for option in options]  # each NaN has a hash of its own
        agreed = Agreement(
            used=used,
            late=bytes([bucket.is_late for bucket in self.buckets]),
            has_failed=self._failure is not None,
            has_nonfinite=self._nonfinite is not None and bool(self._nonfinite.found()),
            counting=self.tokens.counting,
            microbatch=self.microbatch + hash((*comparable, self._num_agreements)),
        )
        if not self._must_agree:
            return agreed
        agreed = agreed.over_ranks(self._ranks, self._model.tensor_ranks)
        if agreed.is_refused:
            raise self._refuse(agreed, options)
        if self._config.static_graph and not self._has_agreed:
            self._has_agreed = True
            self._static_used = agreed.used
        return agreed

    def _with_replicas(self, agreed: Agreement) -> Agreement:
        """Returns the facts of all replicas together."""
        if self.replicas is None:
            return agreed
        flags = self.replicas.any_of(agreed.used + agreed.late + bytes(agreed.counting))
        is_counted, is_uncounted = map(bool, flags[-2:])
        if is_counted and is_uncounted:
            self._drop_reduced()
            raise LossTokensError("losses are counted by tokens in some replicas only: count them in all, or in none")
        num_used = len(agreed.used)
        return dataclasses.replace(
            agreed, used=flags[:num_used], late=flags[num_used:-2], counting=(is_counted, is_uncounted)
        )

    def _check_promises(self) -> None:
        """Raises UnusedParameterError if parameters were used against the promises of the configuration."""
        missing = b"".join(
            [bytes(map(bucket.missing.__contains__, range(len(bucket.params)))) for bucket in self.buckets]
        )
        if self._config.static_graph:
            if not self._has_agreed:
                self._static_missing = missing
            changed = [place for place, flag in enumerate(missing) if flag != self._static_missing[place]]
            promise = "static_graph=True: the same parameters as in the first synchronised backward must be used"
        else:
            changed = [place for place, flag in enumerate(missing) if flag]
            promise = "find_unused_parameters=False: every parameter must be used"
        if not changed:
            return
        order = self.layout.param_order
        names = [self.layout.params[index].name for index in sorted(order[place] for place in changed)]
        first = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        what = "no gradient" if missing[changed[0]] else "a gradient"
        raise UnusedParameterError(
            f"rank {self._ranks.rank}: {len(names)} parameter(s) received {what} in this backward against {promise}: "
            f"{first}. Drop the option (unused parameters are handled by default, at one byte a parameter a step), or "
            "freeze what is never used"
        )

    def _refuse(self, agreed: Agreement, options: Sequence[float]) -> MegastrategyError:
        reasons = Reasons(
            self._name,
            self.microbatch,
            [] if self._nonfinite is None else self._nonfinite.found(),
            options,
            self._failure,
            self.tokens.state,
        )
        self._drop_reduced()
        return agreed.refusal(reasons, self._ranks, self._model.tensor_ranks)

    def _drop_reduced(self) -> None:
        """Waits for what is on the wire, and drops all gradients: all ranks reject them."""
        self._wait_for_buckets()
        self._is_finishing = False
        self.drop()

    def make_plan(self) -> None:
        """Makes the plan in the order of registration, if there is none: a step without a synchronised backward, or a
        method of the optimizer, comes before the first one. All ranks call this."""
        if self.memory is None:
            self._set_plan(self.layout)
            self._close_buckets()

    def _make_plan(self) -> None:
        """Makes the plan in the order seen. Collective."""
        if self.replicas is not None:  # they may see another order, and one that comes back has seen none
            self._set_plan(self.layout)
            return
        required = [param.requires_grad for param in self.params]
        self._set_plan(plan_as_seen(self.layout, self._config, self._ranks, self._model, self._arrivals, required))

    def _set_plan(self, layout: BufferLayout) -> None:
        """Sets the plan, and moves weights to their addresses; see plan's [Note: why the plan is made late]."""
        before = self.layout
        self.layout = layout
        self.memory = Memory(layout, self.params, self._device, self._parts, keeps_grads=self._bucket_class is Bucket)
        self.buckets = [self._make_bucket(self.layout, number) for number in range(len(self.layout.buckets))]
        for bucket in self.buckets:  # as if it had been open in this backward
            bucket.waiting.update(place for place in bucket.awaited if bucket.params[place].grad is None)
        self._set_order()
        self._arrivals = []
        self._num_launched = 0
        self._place_main_grads()
        self._make_hooks()
        if self.layout is not before:
            emit(self._listener, EventKind.LAYOUT_CHANGED, len(self.buckets))

    # --- around backwards ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish_local(self) -> None:
        """Reduces gradients that have accumulated without a reduction. Collective if there are any."""
        self.recover()
        self._ends_window = True
        if not self.has_local_grads:
            if self.layout.is_pooled and not self.tokens.is_final:  # reduced already, under no_sync
                self._finish_window(is_counted=self.tokens.is_used)
            return
        if self.memory is None:
            self._make_plan()
        self._open_buckets()
        self.finish()

    @property
    def has_local_grads(self) -> bool:
        """Whether gradients have accumulated that were not reduced."""
        if self.memory is None:
            return any(grad is not None for grad in map(get_grad, self.params))
        return not self.is_settled and any(bucket.has_local() for bucket in self.buckets)

    def recover(self) -> None:
        """Ends a forward or a backward that has raised; see [Note: an error in user code]."""
        if self._failure is not None and not inside_backward():
            self._end_failed()
        else:
            self._recover_backward()

    def _recover_backward(self) -> None:
        is_over = self._is_running and self._end_of_backward() is None
        if (is_over or self._is_finishing) and not inside_backward():
            self._end_failed()

    @torch.no_grad()
    def _end_failed(self) -> None:
        is_syncing = self._failure is not None or self._is_finishing or self._is_syncing
        if not (self._is_running or self._is_finishing or self._is_batch_unfinished):  # a forward has raised
            self._open_buckets()
        self._is_running = False
        if self._main_grads is not None:
            self._main_grads.end()
        self._task = NO_GRAPH_TASK
        self._prepared.clear()
        if not is_syncing:
            self._accumulate()
            return
        self._failure = self._failure or "its backward raised"
        self._is_batch_unfinished = False
        # The gradients are dropped. Sums over tensor ranks, of those that have arrived here, would match no other's.
        for bucket in self.buckets[self._num_launched :]:
            set_grads(bucket.params, [None] * len(bucket.params))
        try:
            with contextlib.suppress(BackwardFailedError):  # user code has seen this rank's exception
                self.finish()
        finally:
            self._failure = None
            self._is_finishing = False
            self.drop()

    def drop(self) -> None:
        """Drops all gradients."""
        self._forget_main_grads(self.params)
        if self._nonfinite is not None:
            self._nonfinite.clear()
        self._is_settled = False
        self.tokens.drop()
        if self.memory is None:
            set_grads(self.params, [None] * len(self.params))
        for bucket in self.buckets:
            bucket.drop()

    def clear(self, params: Sequence[Parameter]) -> None:
        """Drops the gradients of these parameters."""
        self._recover_backward()  # one of an earlier forward may come after a forward that raised
        self._forget_main_grads(params)
        set_grads(params, [None] * len(params))

    def _forget_main_grads(self, params: Sequence[Parameter]) -> None:
        if self._main_grads is not None:
            self._main_grads.forget(params)

    def zero(self, params: Sequence[Parameter]) -> None:
        """Zeroes the gradients of these parameters."""
        self._recover_backward()
        for param in params:
            if param.grad is not None:
                param.grad.detach().zero_()
        if self.tokens.is_used:
            zeroed = set(map(id, params))
            self.tokens.zero(place for place, param in enumerate(self.params) if id(param) in zeroed)

    def abort_unfinished(self) -> None:
        """Ends reductions of a backward that failed, on the device: they may wait for a rank that is gone."""
        # NCCL's watchdog would otherwise end this process when another rank gives up and aborts.
        if any(bucket.state is State.IN_FLIGHT for bucket in self.buckets):
            self._ranks.abort()

    def close(self, *, keeps_grads: bool) -> None:
        """Removes the hooks, without waiting for reductions: after an error on another rank they might never end.

        ``keeps_grads``: full gradients in the parameter's dtype stay, as when torch DDP's wrapper is dropped.
        """
        self.abort_unfinished()
        self.remove_hooks()
        if self.replicas is not None:
            self.replicas.stop()
        if self._main_grads is not None:
            self._main_grads.close()
        self._swap_guards.clear()
        self._accumulators.drop()
        for param, spec in zip(self.params, self.layout.params, strict=True):
            grad = param.grad
            param.grad = None
            if spec.dtype in SIXTEEN_BIT_DTYPES and spec.grad_dtype != spec.dtype:
                param.grad_dtype = spec.dtype
            elif keeps_grads and not isinstance(grad, ReducedGrad):
                param.grad = grad
        self.buckets = []


def _stepped_in_backward(name: str) -> ParameterChangedError:
    """Returns the error for a parameter that a hook has stepped, or whose gradient it has dropped, in a backward."""
    return ParameterChangedError(
        f"parameter {name!r} was changed, or its .grad set to None, during a backward: an optimizer that steps in a "
        "gradient hook (register_post_accumulate_grad_hook or register_hook: optimizer in backward, LOMO) uses this "
        "rank's own gradient, and the ranks' weights would part. Step after backward(), with a DistributedOptimizer; "
        'for gradients in less memory, DistributedDataParallelConfig(grad_buffer="pooled")'
    )


def _ended() -> None:
    """The end of a backward before there was one."""


def _recording_hook(this: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    def on_grad(_: Tensor) -> None:
        reducer = this()
        if reducer is not None:
            reducer.on_recorded(index)

    return on_grad


def _bucket_hook(this: weakref.ref[Reducer], bucket: Bucket, place: int) -> Callable[[Tensor], None]:
    waiting = bucket.waiting
    arrive = waiting.remove
    bucket_ref = weakref.ref(bucket)

    def on_grad(_: Tensor) -> None:
        try:
            arrive(place)
        except KeyError:
            reducer = this()
            late = bucket_ref()
            if reducer is not None and late is not None:
                reducer.on_unexpected(late, place)
            return
        if not waiting:
            reducer = this()
            complete = bucket_ref()
            if reducer is not None and complete is not None:
                reducer.on_complete(complete)

    return on_grad


def _reporting_hook(hook: Callable[[Tensor], None], index: int, listener: Listener) -> Callable[[Tensor], None]:
    def on_grad(param: Tensor) -> None:
        listener(Event(EventKind.GRAD_READY, index))
        hook(param)

    return on_grad
