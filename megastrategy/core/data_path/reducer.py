"""The reducer: the buckets of one wrapped module, from the first launch to the last reduced gradient.

[Note: when a bucket is launched]
Hooks remove the places of arrived gradients from the ``waiting`` set of their bucket. A complete bucket is launched
when all buckets before it have been launched, so every rank launches the same collectives in the same order, whatever
the order of its gradients. At the end of the outermost backward the remaining buckets are launched, the ranks agree on
the used parameters, and wait: gradients are final when ``backward()`` returns.

[Note: why a late gradient is not lost]
A parameter of two re-entrant checkpoints gets its gradient in two parts, and no set can know this in advance. If the
second part arrives when the bucket is on the wire, autograd stores it in a tensor of its own, since ``Bucket.seal`` has
set ``.grad`` to None. The ranks agree that the bucket is late, and reduce it once more with the second part added. From
then on this rank launches the bucket only at the end of backward.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

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
)
from ..events import EventKind, Listener, emit, profiler_range
from ..layout import SIXTEEN_BIT_DTYPES, BufferLayout, Domain
from ..module import GradHooks, LocalParts, ModelParallel
from .agreement import Agreement, Reasons, name_of_rank
from .bucket import Bucket, State, get_grad, requires_grad, set_grads, widen_grads
from .flattened import FlattenedBucket
from .main_grads import MainGrads, has_main_grad
from .memory import Memory
from .nonfinite import FiniteCheck
from .param_buffers import check_unchanged
from .plan import plan_as_seen
from .pooled import PooledBucket
from .promises import Promises
from .reduced_grad import ReducedGrad, late_grad
from .replica_hook import HookQueue, ReplicaHook
from .tokens import TokenWindow

REFUSALS = (
    BackwardFailedError,
    LayoutMismatchError,
    LossTokensError,
    MicrobatchMismatchError,
    NonFiniteGradError,
)
"""The errors that all data-parallel ranks raise alike in a backward."""
_dtype = operator.attrgetter("dtype")


class Reducer:
    """Reduces the gradients of one wrapped module; a :class:`.BackwardTracker` says when a backward begins and ends.

    Args:
        layout: the plan in the order of registration, in whose order ``params`` are.
        hooks: of the parameters.
        parts, model: where this rank has the parameters, and the groups of ranks that share the model with it.
        ranks: all data-parallel ranks, which agree at the end of a backward.
        ranks_of: returns those that reduce a domain's buckets.

    Attributes:
        layout: the plan; in the order seen, after the first synchronised backward.
        memory, buckets: None and empty until then.
        arrivals: the parameters in the order of their gradients, until there is a plan.
        num_launched: the buckets of the present backward, or batch, that are reduced or on the wire.
        microbatch: the number of the microbatch, if the training loop counts them.
        stepped_options: the options of the steps since the last agreement, which all ranks share.
        num_reductions: the synchronised backwards so far.
        num_steps: the steps so far of all optimizers.
        shown: every ``.grad`` when the last reduction ended, in launch order; the same object while they stay.
        is_finishing: from the end of a synchronised backward until its gradients are final, or dropped.
        tokens: the window of losses that are averaged by tokens.
        main_grads: the parameters whose layers add gradients themselves; None for none.
        replicas: calls the hook of other replicas; None without.
        drops_step: whether replicas have dropped the last batch, which no optimizer steps.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: list[Parameter],
        hooks: GradHooks,
        parts: LocalParts,
        model: ModelParallel,
        config: DistributedDataParallelConfig,
        ranks: Collectives,
        ranks_of: Callable[[Domain], Collectives],
        device: torch.device,
        listener: Listener | None,
        all_reduce_option: str,
    ) -> None:
        self.layout = layout
        self.params = params
        self.memory: Memory | None = None
        self.buckets: list[Bucket] = []
        self.arrivals: list[int] = []
        self.num_launched = 0
        self.microbatch = 0
        self.stepped_options: list[float] = []
        self.num_reductions = 0
        self.num_steps = 0
        self.shown: list[Tensor | None] = []
        self.is_finishing = False
        self.tokens = TokenWindow(params)
        self.main_grads: MainGrads | None = None
        self.replicas: HookQueue | None = None
        self.drops_step = False
        self._is_settled = False  # since the last reduction no backward has begun, and nothing was dropped
        self._ordered: list[Parameter] = []  # in launch order
        self._required = b""  # a byte for each of them: requires_grad when the last backward began
        self._hooks = hooks
        self._parts = parts
        self._model = model
        self._config = config
        self._ranks = ranks
        self._ranks_of = ranks_of
        self._device = device
        self._listener = listener
        self._all_reduce_option = all_reduce_option
        self._has_pooled_experts = False
        self._num_agreements = 0
        self._name = name_of_rank(ranks, model.tensor_ranks)
        self._promises: Promises | None = None
        if config.static_graph or not config.find_unused_parameters:
            self._promises = Promises(ranks.rank, is_static=config.static_graph)
        self._nonfinite: FiniteCheck | None = None
        if config.check_for_nan_in_grad:
            self._nonfinite = FiniteCheck(
                self._name, lambda device: ranks.wait_for_device(device, "a collective before check_for_nan_in_grad")
            )
        self._dtypes: list[torch.dtype] = []
        self._num_known = 0
        self._include(layout)

    # --- parameters, and the plan -------------------------------------------------------------------------------------

    def _include(self, layout: BufferLayout) -> None:
        """Prepares the parameters beyond the known ones."""
        self.layout = layout
        for param, spec in zip(self.params[self._num_known :], layout.params[self._num_known :], strict=True):
            if spec.dtype in SIXTEEN_BIT_DTYPES and spec.grad_dtype != spec.dtype:
                param.grad_dtype = None  # ``.grad`` may be a view of an fp32 buffer
        if self.main_grads is None and any(map(has_main_grad, self.params[self._num_known :])):
            self.main_grads = MainGrads(self._parts)
        if self.main_grads is not None:
            have_place = self._bucket_class is Bucket
            self.main_grads.include(layout, self.params, self._num_known, have_place=have_place)
        joined = self.params[self._num_known :]
        self._hooks.guard([param for param in joined if self._parts.local_view(param) is param])
        self._num_known = len(self.params)
        self._dtypes = [spec.dtype for spec in layout.params]

    def extend(self, layout: BufferLayout) -> None:
        """Includes parameters that were appended to ``params``, with buckets of their own behind the present ones."""
        num_buckets = len(self.layout.buckets)
        self.layout = layout
        if self.memory is not None:
            self.memory.extend(layout, self.params)
            self.buckets += [self._make_bucket(layout, number) for number in range(num_buckets, len(layout.buckets))]
        if self._promises is not None:
            self._promises.used = None
        self._is_settled = False
        self._set_order()
        self._include(layout)
        if self.memory is not None:
            self._place_main_grads()

    def _set_order(self) -> None:
        self._ordered = [param for bucket in self.buckets for param in bucket.params]
        self._required = b""

    def _place_main_grads(self) -> None:
        if self.main_grads is None:
            return
        assert self.memory is not None
        slots = self.layout.slots
        self.main_grads.place(self.memory.grad_views, lambda index: self.buckets[slots[index].bucket])

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

    def check_params(self) -> None:
        """Raises ParameterChangedError if a parameter has another dtype or shape than when it was wrapped."""
        if list(map(_dtype, self.params)) != self._dtypes:
            for param, spec in zip(self.params, self.layout.params, strict=True):
                check_unchanged(self._parts.local_view(param), spec)

    def plan_as_registered(self) -> None:
        """Makes the plan in the order of registration: a step without a synchronised backward, or a method of the
        optimizer, comes before the first one. All ranks call this."""
        self._set_plan(self.layout)
        self.cancel()

    def plan_as_seen(self) -> None:
        """Makes the plan in the order of the first synchronised backward. Collective."""
        if self.replicas is not None:  # they may see another order, and one that comes back has seen none
            self._set_plan(self.layout)
            return
        required = [param.requires_grad for param in self.params]
        self._set_plan(plan_as_seen(self.layout, self._config, self._ranks, self._model, self.arrivals, required))

    def _set_plan(self, layout: BufferLayout) -> None:
        """Sets the plan, and moves weights to their addresses; see plan's [Note: why the plan is made late]."""
        before = self.layout
        self.layout = layout
        self.memory = Memory(layout, self.params, self._device, self._parts, keeps_grads=self._bucket_class is Bucket)
        self.buckets = [self._make_bucket(self.layout, number) for number in range(len(self.layout.buckets))]
        for bucket in self.buckets:  # as if it had been open in this backward
            bucket.waiting.update(place for place in bucket.awaited if bucket.params[place].grad is None)
        self._set_order()
        self.arrivals = []
        self.num_launched = 0
        self._place_main_grads()
        if self.layout is not before:
            emit(self._listener, EventKind.LAYOUT_CHANGED, len(self.buckets))

    # --- a backward ---------------------------------------------------------------------------------------------------

    def open(self, first: int = 0) -> None:
        """Begins a backward; in a batch with the buckets from number ``first`` on, which are not launched yet."""
        self.num_launched = first
        self._has_pooled_experts = self.layout.is_pooled and len(self.layout.domains) > 1
        self._is_settled = False
        required = bytes(map(requires_grad, self._ordered))
        if required != self._required:
            self._required = required
            for bucket in self.buckets:
                bucket.update_awaited()
        has_grads = any(map(operator.is_not, map(get_grad, self._ordered), itertools.repeat(None)))
        for bucket in self.buckets[first:] if first else self.buckets:
            bucket.open(has_grads=has_grads)

    def note_unprepared(self, bucket: Bucket) -> None:
        """Notes that a backward which no forward prepared has brought gradients."""
        bucket.has_unprepared = True
        self._is_settled = False

    def note_late(self, bucket: Bucket, place: int) -> None:
        """Notes a gradient that has arrived after the launch of its bucket; see [Note: why a late gradient is not
        lost]."""
        if not self._exchanges:
            raise BucketInFlightError(
                f"parameter {bucket.specs[place].name!r}: a second gradient arrived in one backward after bucket "
                f"{bucket.plan.index} had been launched (a second backward inside the first, or a layer used by two "
                "re-entrant checkpoints).\n"
                "Leave find_unused_parameters on and static_graph off, or use checkpoint(use_reentrant=False)"
            )
        bucket.is_late = True

    def has_arrived(self) -> bool:
        """Whether the running backward has brought any gradient."""
        if self.memory is None:
            return bool(self.arrivals)
        return any(len(bucket.waiting) != len(bucket.awaited) for bucket in self.buckets)

    def cancel(self) -> None:
        """Ends a backward that has brought no gradient."""
        for bucket in self.buckets:
            bucket.waiting.clear()

    def accumulate(self) -> None:
        """Ends a backward whose gradients stay on this rank."""
        for bucket in self.buckets:
            if bucket.state is State.OPEN:
                bucket.accumulate()
        if self.memory is None:
            widen_grads(self.params, self.layout.params)

    def launch_complete(self) -> None:
        """Launches, in a backward, the complete buckets whose turn it is; see [Note: when a bucket is launched]."""
        if not self._config.overlap_grad_reduce:
            return
        buckets = self.buckets
        while self.num_launched < len(buckets) and not buckets[self.num_launched].waiting:
            # Hazard: a backward of divided experts exchanges tokens. A rank that waits here for a bucket of a rank
            # whose experts got none, and whose bucket follows its backward, would keep that rank waiting for tokens.
            if self._has_pooled_experts and not buckets[self.num_launched].launches_at_once:
                return
            self._launch_next(inside_backward=True)

    def _launch_next(self, *, inside_backward: bool) -> None:
        bucket = self.buckets[self.num_launched]
        with profiler_range("reduce", bucket.plan.index):
            bucket.seal()
            if inside_backward and (self._hooks.watches_steps or 0 in bucket.used):
                self._check_arrived(bucket)
            if self._nonfinite is not None:
                bucket.check_finite(self._nonfinite)
            bucket.launch()
        self.num_launched += 1

    def _check_arrived(self, bucket: Bucket) -> None:
        """Raises ParameterChangedError if user code dropped a gradient, or stepped, inside of the backward."""
        for place, index in enumerate(bucket.plan.params):
            if place in bucket.missing or not bucket.params[place].requires_grad:
                continue
            if self._hooks.is_stepped(index) or not bucket.used[place]:
                raise stepped_in_backward(bucket.specs[place].name)

    def check_users_hooks(self, indices: Sequence[int]) -> None:
        """Raises ParameterChangedError if a hook of user code stepped a parameter, or dropped its gradient."""
        for index in indices if self._hooks.watches_steps else ():
            if self.params[index].grad is None or self._hooks.is_stepped(index):
                raise stepped_in_backward(self.layout.params[index].name)

    # --- its end ------------------------------------------------------------------------------------------------------

    @property
    def _exchanges(self) -> bool:
        """Whether every synchronised backward ends with an exchange of the used parameters."""
        return self._promises is None or self._promises.needs_exchange

    @property
    def must_agree(self) -> bool:
        """Whether the next synchronised backward ends with an exchange."""
        # Whether losses are counted by tokens is the same on all ranks only after an exchange, so the first backward
        # has one.
        return self._exchanges or self._config.check_for_nan_in_grad or self.tokens.is_used or self.num_reductions == 0

    def finish(self, *, ends_window: bool, failure: str | None, ends_batch: bool) -> None:
        """Reduces all gradients that are not reduced, and waits; there is a plan. Collective.

        Args:
            ends_window: whether a step may follow; not with pooled gradients under no_sync.
            failure: the error of a forward or a backward of this rank that has raised.
            ends_batch: False for a backward of a batch that more follow.

        Raises, on all ranks alike:
            MicrobatchMismatchError: if the ranks are not at the same microbatch.
            BackwardFailedError: if a forward or a backward has raised on another rank.
            NonFiniteGradError: if a gradient is not finite, and the configuration checks it.
            LossTokensError: if only some losses were counted by tokens.
            LayoutMismatchError: if the ranks have stepped with different options.
        """
        try:
            self._finish(ends_window=ends_window, failure=failure, ends_batch=ends_batch)
        except REFUSALS:
            if self.replicas is not None:
                self.replicas.hook.commit(is_refused=True)
            raise
        if self.replicas is not None and ends_window:
            self.drops_step = not self.replicas.hook.commit(is_refused=False)
            grads = [grad for bucket in self.buckets for grad in bucket.final_grads()] if self.drops_step else []
            if grads:  # a sum that has failed may have left anything
                torch._foreach_zero_(grads)

    def _finish(self, *, ends_window: bool, failure: str | None, ends_batch: bool) -> None:
        while self.num_launched < len(self.buckets):
            self._launch_next(inside_backward=False)
        emit(self._listener, EventKind.WAIT_START, 0)
        try:
            with profiler_range("wait for gradients"):
                try:
                    agreed = self._with_replicas(self._agree(failure))
                except MegastrategyError:
                    # The ranks with copies wait for this one, and learn of the error afterwards.
                    self._share_copies(bytes(len(self.params)), ends_batch=ends_batch)
                    raise
                self._wait_for_buckets()
        finally:
            emit(self._listener, EventKind.WAIT_END, 0)
        for number in [number for number, flag in enumerate(agreed.late) if flag]:
            self.buckets[number].reduce_again()
        used = self._share_copies(agreed.used, ends_batch=ends_batch)
        position = 0
        for bucket in self.buckets:
            end = position + len(bucket.params)
            bucket.publish(used[position:end])
            position = end
        self.is_finishing = False
        self.num_reductions += 1
        self.tokens.is_used |= agreed.counting[0]
        if ends_window:
            self.finish_window(is_counted=agreed.counting[0])
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

    def finish_window(self, *, is_counted: bool) -> None:
        """Makes reduced gradients the mean over tokens, if losses are counted, before a step."""
        if is_counted:
            try:
                self.tokens.finish(self.buckets, self._ranks, self._model.tensor_ranks, self.replicas, self.num_steps)
            except LossTokensError:
                self.drop()
                raise
        else:
            self.tokens.end_window(self.num_steps)

    def _share_copies(self, used: bytes, *, ends_batch: bool) -> bytes:
        """Adds up the reduced gradients of parameters that several stages have. Collective over these stages.

        ``used``, and the result: a byte for each parameter, in launch order, whether any rank has a gradient.
        """
        if not ends_batch or not self.layout.has_copies:
            return used
        order = self.layout.param_order
        has_grad = [False] * len(order)
        for place, index in enumerate(order):
            has_grad[index] = bool(used[place])
        for group in self._model.groups:
            group.agree_on_copies(self.params, has_grad)
            group.add_up_copies(self.params, lambda index: self.buckets[self.layout.slots[index].bucket].reduced)
        return bytes(has_grad[index] for index in order)

    def _agree(self, failure: str | None) -> Agreement:
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
        if self._promises is not None:
            if failure is None:
                self._promises.check(b"".join([bucket.missing_flags() for bucket in self.buckets]), self.layout)
            if self._promises.used is not None:
                used = self._promises.used
        # With the count, so that different options with the same last bits are noticed at another time.
        self._num_agreements += 1
        comparable = [option if option == option else () for option in options]  # each NaN has a hash of its own
        agreed = Agreement(
            used=used,
            late=bytes([bucket.is_late for bucket in self.buckets]),
            has_failed=failure is not None,
            has_nonfinite=self._nonfinite is not None and bool(self._nonfinite.found()),
            counting=self.tokens.counting,
            microbatch=self.microbatch + hash((*comparable, self._num_agreements)),
        )
        if not self.must_agree:
            return agreed
        agreed = agreed.over_ranks(self._ranks, self._model.tensor_ranks)
        if agreed.is_refused:
            raise self._refuse(agreed, options, failure)
        if self._promises is not None:
            self._promises.agree(agreed.used)
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

    def _refuse(self, agreed: Agreement, options: Sequence[float], failure: str | None) -> MegastrategyError:
        reasons = Reasons(
            self._name,
            self.microbatch,
            [] if self._nonfinite is None else self._nonfinite.found(),
            options,
            failure,
            self.tokens.state,
        )
        self._drop_reduced()
        return agreed.refusal(reasons, self._ranks, self._model.tensor_ranks)

    def _drop_reduced(self) -> None:
        """Waits for what is on the wire, and drops all gradients: all ranks reject them."""
        self._wait_for_buckets()
        self.is_finishing = False
        self.drop()

    # --- around backwards ---------------------------------------------------------------------------------------------

    @property
    def has_local_grads(self) -> bool:
        """Whether gradients have accumulated that were not reduced."""
        if self.memory is None:
            return any(grad is not None for grad in map(get_grad, self.params))
        return not self.is_settled and any(bucket.has_local() for bucket in self.buckets)

    def drop_unlaunched(self) -> None:
        """Drops the gradients that are not on the wire, after a backward that has raised."""
        # Sums over tensor ranks, of those that have arrived here, would match no other's.
        for bucket in self.buckets[self.num_launched :]:
            set_grads(bucket.params, [None] * len(bucket.params))

    def drop(self) -> None:
        """Drops all gradients."""
        self.forget_main_grads(self.params)
        if self._nonfinite is not None:
            self._nonfinite.clear()
        self._is_settled = False
        self.tokens.restart()
        if self.memory is None:
            set_grads(self.params, [None] * len(self.params))
        for bucket in self.buckets:
            bucket.drop()

    def clear(self, params: Sequence[Parameter]) -> None:
        """Drops the gradients of these parameters."""
        self.forget_main_grads(params)
        set_grads(params, [None] * len(params))

    def forget_main_grads(self, params: Sequence[Parameter]) -> None:
        """Notes that gradients of these parameters were dropped."""
        if self.main_grads is not None:
            self.main_grads.forget(params)

    def zero(self, params: Sequence[Parameter]) -> None:
        """Zeroes the gradients of these parameters."""
        for param in params:
            if param.grad is not None:
                param.grad.detach().zero_()
        if len(params) == len(self.params):
            self.tokens.restart()

    def abort_unfinished(self) -> None:
        """Ends reductions of a backward that failed, on the device: they may wait for a rank that is gone."""
        # NCCL's watchdog would otherwise end this process when another rank gives up and aborts.
        if any(bucket.state is State.IN_FLIGHT for bucket in self.buckets):
            self._ranks.abort()

    def release(self, *, keeps_grads: bool) -> None:
        """Leaves the parameters without ``.grad`` of the engine's.

        ``keeps_grads``: full gradients in the parameter's dtype stay, as when torch DDP's wrapper is dropped.
        """
        if self.replicas is not None:
            self.replicas.stop()
        if self.main_grads is not None:
            self.main_grads.close()
        for param, spec in zip(self.params, self.layout.params, strict=True):
            grad = param.grad
            param.grad = None
            if spec.dtype in SIXTEEN_BIT_DTYPES and spec.grad_dtype != spec.dtype:
                param.grad_dtype = spec.dtype
            elif keeps_grads and not isinstance(grad, ReducedGrad):
                param.grad = grad
        self.buckets = []


def stepped_in_backward(name: str) -> ParameterChangedError:
    """Returns the error for a parameter that a hook has stepped, or whose gradient it has dropped, in a backward."""
    return ParameterChangedError(
        f"parameter {name!r} was changed, or its .grad set to None, during a backward: an optimizer that steps in a "
        "gradient hook (register_post_accumulate_grad_hook, LOMO) uses this rank's own gradient, and weights would "
        "differ between ranks.\n"
        'Step after backward(), with a DistributedOptimizer; grad_buffer="pooled" has gradients in less memory'
    )
