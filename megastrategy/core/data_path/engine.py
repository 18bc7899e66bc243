"""The parts of one wrapped model, from its wrapping to its closing: layout, reducer, gather, ranks."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from ..collectives import (
    Collectives,
    close_when_collected,
    make_collectives,
    num_private_groups,
    private_group,
    second_collectives,
    shard_collectives,
)
from ..config import DistributedDataParallelConfig
from ..errors import MegastrategyError, raise_closed
from ..events import EventKind, Listener, emit
from ..layout import BufferLayout, Domain, Owners, build_layout, describe_setup, find_weight_chunks
from ..module import (
    GradHooks,
    ModuleWatch,
    agree_on_layout,
    check_memory_is_own,
    check_module,
    check_no_experts,
    check_no_renormed_rows,
    close_other_engines,
    common_device,
    find_groups,
    ignored_names,
    named_buffers,
    named_params,
    option_rows,
    param_spec,
)
from .backward_tracker import BackwardTracker, DeferredBatch
from .bucket import State, get_grad, set_grads
from .gather import Gather
from .main_grads import declare_main_grads, withdraw_main_grads
from .norms import norms_over_owners, total_grad_norm, zero_norms
from .reduced_grad import ReducedGrad
from .reducer import Reducer

_MANY_GROUPS = 8


class SteppingOptimizer(Protocol):
    """What an engine asks of the optimizers that step its parameters."""

    num_steps_begun: int

    @property
    def needs_ranks(self) -> bool:
        """Whether it still needs the engine's groups of ranks."""

    def num_kept(self) -> dict[int, int] | None:
        """Returns how many numbers an element the state keeps, by parameter; None if that is not known."""

    def owners(self) -> dict[int, int]:
        """Returns the rank that steps each whole parameter."""

    def neighbour_groups(self) -> dict[int, Hashable]:
        """Returns a key by parameter: neighbours with the same key are stepped as one tensor."""


class Engine:
    """Connects reducer and gather of one wrapped module.

    Attributes:
        wrapper: a weak reference to the wrapper.
        params: the trainable parameters, in the order of ``layout.params``.
        index_by_id: ``id(param)`` to the parameter's index in ``params`` and ``layout``.
        optimizers: weak references to the optimizers of this model, in the order of their construction.

    Raises:
        ValueError: if the module cannot be laid out.
        LayoutMismatchError: if the ranks' modules or configurations differ.
    """

    def __init__(
        self,
        wrapper: nn.Module,
        config: DistributedDataParallelConfig,
        *,
        process_group: ProcessGroup | None,
        collectives: Collectives | None,
        listener: Listener | None,
        should_sync: Callable[[bool | None], bool],
        all_reduce_option: str,
        expert_mesh: DeviceMesh | None,
    ) -> None:
        self.wrapper = weakref.ref(wrapper)
        self.config = config
        self.all_reduce_option = all_reduce_option
        self.is_closed = False
        self.optimizers: list[weakref.ref[SteppingOptimizer]] = []
        self.params: list[Parameter] = []
        self.index_by_id: dict[int, int] = {}
        self._padding: list[Tensor] = []
        self._num_padded = 0  # the buckets in it
        self._kind = type(wrapper)
        self._modules = wrapper._modules
        self._listener = listener
        # Before any collective: if a rank rejects its module, the others must not wait for it.
        check_module(self.module, self._kind)
        self._ignored = ignored_names(self.module)
        self.device = common_device(self.named_params())
        self.local_parts, self.model_parallel = find_groups(self.module, process_group, expert_mesh, config)
        self._check_parts()
        self.collectives = self._buffer_collectives = self._connected(process_group, collectives)
        for group in self.model_parallel.groups:
            group.connect(self.device)
        self.watch = ModuleWatch(self._modules, self._ignored)
        layout, joined = self._plan()
        self._add_params(joined)
        # After the ranks have agreed on the layout: broadcasts of different modules would not match.
        self.broadcast_all()
        # Not a method: reducer and gather would refer to this object, which is freed without garbage collection.
        ranks_of = functools.partial(shard_collectives, self.collectives, device=self.device)
        decides = weakref.WeakMethod(should_sync)  # of the wrapper, which may be collected
        self._declared = declare_main_grads(self.module)
        hooks = GradHooks(self.params)
        try:
            self.reducer = Reducer(
                layout,
                self.params,
                hooks,
                self.local_parts,
                self.model_parallel,
                config,
                self.collectives,
                ranks_of,
                self.device,
                listener,
                all_reduce_option,
            )
        except ValueError:
            withdraw_main_grads(self._declared)
            raise
        self.backwards = BackwardTracker(
            self.reducer,
            hooks,
            self.collectives.size,
            lambda decision: (decide := decides()) is not None and decide(decision),
            listener,
            weakref.ref(self),
        )
        self.gather = Gather(config.overlap_param_gather, ranks_of, listener)
        if layout.num_shards > 1:
            for domain in layout.domains:
                self.ranks_of(domain).connect(self.device, exchanges=bool(layout.received_nbytes))
            # A forward begins with a broadcast of module buffers, which would wait for gathers in the same queue.
            if config.overlap_param_gather and config.broadcast_buffers and named_buffers(self.module, self._ignored):
                self._buffer_collectives = second_collectives(self.collectives, self.device)
                self._buffer_collectives.connect(self.device, exchanges=False)
        for group in self.model_parallel.groups:
            group.attach(self)

    def _check_parts(self) -> None:
        for group in self.model_parallel.groups:
            group.check(self.module)
        self.local_parts.check(self.module)

    def _connected(self, process_group: ProcessGroup | None, collectives: Collectives | None) -> Collectives:
        self._end: Callable[[], object] | None = None
        if collectives is None:
            # Each group has threads and descriptors. Those of a dropped model in a cycle of references end when the
            # cycle is collected.
            if num_private_groups() >= _MANY_GROUPS:
                gc.collect()
            group = private_group(process_group, self.device)
            collectives = make_collectives(group, self.device)
            self._end = close_when_collected(self, collectives, group if group is not process_group else None)
        # Hazard: collectives that were passed may serve other models, and garbage is collected at any time in any
        # thread. If they were closed with this object, another model's collective would never run.
        return collectives

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes this object None in copies and pickles of objects that refer to it, such as a Trainer during a fit."""
        return type(None), ()

    # --- the module ---------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        module = self._modules["module"]
        assert module is not None, "torch refuses None for a module"
        return module

    @property
    def layout(self) -> BufferLayout:
        """The plan: in the order of registration, and in the order seen after the first synchronised backward."""
        return self.reducer.layout

    @property
    def is_sharded(self) -> bool:
        """Whether optimizers are sharded over the ranks."""
        return self.layout.num_shards > 1

    def ranks_of(self, domain: Domain) -> Collectives:
        """Returns the collectives of the ranks that own a domain's buckets."""
        return shard_collectives(self.collectives, domain, self.device)

    @property
    def shard_collectives(self) -> Collectives:
        """``collectives`` for the ranks among which each element has one owner: all ranks, or an instance."""
        return self.ranks_of(self.layout.domain)

    @property
    def has_optimizer(self) -> bool:
        """Whether a DistributedOptimizer was made for this model."""
        return bool(self.optimizers)

    @property
    def steps_params_themselves(self) -> bool:
        """Whether any torch optimizer may step the Parameters: complete on every rank, and without main params."""
        if self.is_sharded or self.local_parts.has_parts:
            return False
        return not any(spec.has_main_param for spec in self.layout.params)

    @property
    def is_in_use(self) -> bool:
        """Whether the wrapper exists, or this is closed already."""
        return self.is_closed or self.wrapper() is not None

    def named_params(self) -> dict[str, Parameter]:
        """Returns the module's parameters, frozen ones too, without ignored ones."""
        return named_params(self.module, self._ignored)

    def ignored_params(self) -> set[int]:
        """Returns the ids of ignored parameters, which belong to each rank."""
        if not self._ignored:
            return set()
        return set(map(id, named_params(self.module).values())) - set(map(id, self.named_params().values()))

    def is_as_wrapped(self) -> bool:
        """Whether the module still has the parameters for which the plan was made; it may have more."""
        present = {id(param) for param in self.named_params().values()}
        return all(
            id(param) in present
            and param.dtype == spec.dtype
            and tuple(self.local_parts.local_view(param).shape) == spec.shape
            for param, spec in zip(self.params, self.layout.params, strict=True)
        )

    def broadcast_all(self) -> None:
        """Broadcasts the module's parameters, frozen ones too, and buffers from rank 0, without ignored ones.
        Collective."""
        tensors = [*self.named_params().values(), *named_buffers(self.module, self._ignored).values()]
        self.model_parallel.broadcast_common(tensors)
        self._broadcast(tensors)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Gives the tensors the values of the first rank that has the same elements, unseen by autograd."""
        common: list[Tensor] = []
        by_domain: dict[Domain, list[tuple[Tensor, Tensor]]] = {}
        for tensor in tensors:
            # Through .data: a forward may have saved the values for a backward that is still to come.
            part = self.local_parts.local_view(tensor).data
            domain = self.model_parallel.domain_of(tensor)
            if domain is None:
                common.append(part)
                continue
            # Of one size on all ranks, which have to start the same number of collectives.
            padded = part.new_zeros(self.local_parts.reserved_numel(tensor))
            padded[: part.numel()] = part.reshape(-1)
            by_domain.setdefault(domain, []).append((part, padded))
        self.collectives.broadcast_all(common)
        for domain, members in by_domain.items():
            self.ranks_of(domain).broadcast_all([padded for _, padded in members])
            for part, padded in members:
                part.copy_(padded[: part.numel()].view(part.shape))

    def broadcast_buffers(self) -> None:
        """Broadcasts the module's buffers from rank 0, without a trace for autograd. Collective."""
        # .data has a version counter of its own: BatchNorm saves its buffers for backward, and a second forward, or a
        # validation, before that backward must not make autograd refuse it.
        self._buffer_collectives.broadcast_all([buffer.data for buffer in self.watch.buffers()])

    def check_params(self) -> None:
        """Raises an error for a replaced parameter, and includes unfrozen ones. Cheap enough before every forward."""
        if self.watch.has_changed() and not self.watch.is_overridden():
            # Their errors are more precise than that of the watch.
            check_module(self.module, self._kind)
            self._check_parts()
            self.watch.update(self.params)
        if any(param.requires_grad for param in self.watch.frozen):
            self.include_trainable()
        if self.is_sharded and self.reducer.memory is None:  # they move when the plan is made
            check_memory_is_own(self.module, self.params, self.local_parts, self.all_reduce_option)

    def include_trainable(self) -> None:
        """Adds parameters that require gradients now and did not before; collective if there are any.

        The parameters get buffers and buckets of their own, after the others. Rank 0's values are broadcast.
        """
        self.check_open()
        layout, joined = self._plan()
        if not joined:
            return
        first = len(self.params)
        self._add_params(joined)
        self.model_parallel.broadcast_common(joined, joins=True)
        self._broadcast(joined)
        self.backwards.extend(self.layout.extended_by(layout))
        self.emit(EventKind.LAYOUT_EXTENDED, first)

    def _plan(self) -> tuple[BufferLayout, list[Parameter]]:
        """Returns the layout of trainable parameters that are not in ``params`` yet, and these parameters. Collective
        if there are any: all ranks agree on the layout."""
        is_first = not self.index_by_id
        new = [(name, param) for name, param in self.named_params().items() if id(param) not in self.index_by_id]
        joining = [(name, param) for name, param in new if param.requires_grad]
        params = [param for _, param in joining]
        parts = self.local_parts
        whole = [param for param in params if parts.local_view(param) is param]
        # Addresses of weights differ between ranks, and tensor ranks have one layout.
        chunks = find_weight_chunks(self.module, whole, self.config) if self.model_parallel.tensor_ranks is None else {}
        specs = [
            dataclasses.replace(
                param_spec(name, parts.local_view(param), self.config, chunks.get(id(param))),
                reserved_numel=parts.reserved_numel(param),
                needs_own_bucket=any(group.needs_own_bucket(param) for group in self.model_parallel.groups),
                domain=self.model_parallel.domain_of(param),
            )
            for name, param in joining
        ]
        layout = build_layout(specs, self.config, self.collectives.size)
        if joining or is_first:
            check_module(self.module, self._kind)
            common_device(self.named_params())
            if self.collectives.size > 1:
                check_no_experts(self.named_params(), self.local_parts)
            close_other_engines(params)
            if layout.num_shards > 1:  # otherwise parameters do not move, and shared memory stays shared
                check_memory_is_own(self.module, params, self.local_parts, self.all_reduce_option)
                check_no_renormed_rows(self.module, params, self.all_reduce_option)
            sent = named_buffers(self.module, self._ignored) if is_first else {}
            layout = agree_on_layout(layout, self.config, self.collectives, sent)
            for group in self.model_parallel.groups:
                group.check_ranks_agree(dict(new), option_rows(self.config), layout.describe_places())
        return layout, params

    def _add_params(self, params: Sequence[Parameter]) -> None:
        self.params += params
        self.index_by_id = {id(param): index for index, param in enumerate(self.params)}
        self.watch.update(self.params)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def zero_grads(self, params: Sequence[Parameter], *, set_to_none: bool) -> None:
        """Drops, or zeroes, the gradients of parameters, unless a group of the model keeps them."""
        if any(group.takes_zero_grad() for group in self.model_parallel.groups):
            return
        if set_to_none:
            self.backwards.clear(params)
        else:
            self.backwards.zero(params)

    def finish_grad_sync(self) -> None:
        """Reduces gradients that have accumulated without a reduction. Collective if there are any."""
        self.check_open()
        self.backwards.finish_local()

    def finish_grads(self) -> None:
        """Reduces the remaining gradients, and adopts those that user code wrote into ``.grad``; before any use of
        reduced gradients. Collective if gradients remain."""
        self.finish_grad_sync()
        if not self.is_sharded or self.reducer.is_settled:
            return
        for bucket in self.reducer.buckets:
            if bucket.state is State.REDUCED and bucket.has_written():
                bucket.adopt_written()

    def reduced_grads(self, members: Collection[int]) -> list[Tensor]:
        """Returns the reduced gradients that this rank owns of these parameters of the layout, with shards: views.

        A whole shard where all of it is theirs, with the elements between parameters.
        """
        grads = []
        for bucket in self.reducer.buckets:
            flags = bucket.reduced_flags()
            is_member = list(map(members.__contains__, bucket.plan.params))
            if all(flags) and all(is_member):
                grads.append(bucket.shard)
                continue
            for place in range(len(flags)):
                owned = bucket.owned(place) if flags[place] and is_member[place] else None
                if owned is not None:
                    grads.append(owned[1])
        return grads

    def zero_padding(self) -> None:
        """Zeroes the elements between parameters, which a factor that is not finite has made NaN."""
        buckets = self.reducer.buckets
        if self._num_padded != len(buckets):
            self._num_padded = len(buckets)
            self._padding = [gap for bucket in buckets if bucket.is_sharded for gap in bucket.padding]
        if self._padding:
            torch._foreach_zero_(self._padding)

    def full_grad(self, param: Parameter) -> Tensor | None:
        """Returns the full reduced gradient of a parameter: its shape, the gradient dtype, memory of its own; None if
        it has none. Collective with reduce-scatter.

        Raises:
            ValueError: if the parameter is not one of the wrapped module's trainable parameters.
        """
        self.check_open()
        index = self.index_by_id.get(id(param))
        if index is None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is not a trainable parameter of the wrapped module"
            )
        grad = param.grad
        if grad is None or not isinstance(grad, ReducedGrad):
            return None if grad is None else grad.detach().clone()
        spec = self.layout.params[index]
        slot = self.layout.slots[index]
        bucket = self.reducer.buckets[slot.bucket]
        bucket.check_written(bucket.plan.params.index(index))
        full = torch.zeros(spec.numel, dtype=bucket.shard.dtype, device=self.device)
        owned = bucket.owned(bucket.plan.params.index(index))
        if owned is not None and self.collectives.rank < self.layout.num_shards:  # other instances own the same
            start, part = owned
            full[start : start + part.numel()] = part
        self.ranks_of(bucket.plan.domain).all_reduce(full, 1.0).wait()  # zero on all ranks but the owner
        full = self.local_parts.as_grad(param, full.as_strided(spec.shape, spec.stride))
        return full if grad.pending is None else full + grad.pending

    def grad_norms(self, norm_type: float) -> Tensor:
        """Returns the norm of each trainable parameter's gradient: 1-D, fp64, in the order of ``layout.params``, 0
        without one. Collective with reduce-scatter."""
        norms = zero_norms((len(self.params),), self.device)
        local = norms.clone()
        for index, param in enumerate(self.params):
            if isinstance(param.grad, ReducedGrad):
                bucket = self.reducer.buckets[self.layout.slots[index].bucket]
                owned = bucket.owned(bucket.plan.params.index(index))
                if owned is not None:
                    norms[index] = total_grad_norm([owned[1]], norm_type, None, self.device)
            elif param.grad is not None:
                part = self.local_parts.local_grad(param)
                assert part is not None, "grad is not None"
                local[index] = total_grad_norm([part], norm_type, None, self.device)
        if self.is_sharded:
            norms = norms_over_owners(norms, norm_type, self.shard_collectives)
        norms = torch.maximum(norms, local)
        part_ranks = next((group.ranks for group in self.model_parallel.groups if group.state is None), None)
        if part_ranks is not None:
            is_counted = map(self.model_parallel.is_counted_here, self.params)
            norms *= torch.tensor(list(is_counted), dtype=norms.dtype, device=norms.device)
            norms = norms_over_owners(norms, norm_type, part_ranks)
        return norms

    @property
    def sends_under_backward(self) -> bool:
        """Whether buckets are sent to other ranks during backward."""
        return self.collectives.size > 1 and self.config.overlap_grad_reduce

    # --- batches of several backwards ---------------------------------------------------------------------------------
    # A pipeline runs all backwards of a batch inside of its forward, and calls these methods.

    def begin_batch(self, batch: DeferredBatch) -> None:
        """Drops all gradients, and begins a batch: its reductions are waited for in :meth:`finish_batch`."""
        self.backwards.begin_batch(batch)

    def prepare_backward(self, outputs: Any, *, is_last: bool, has_loss: bool) -> None:
        """Prepares a backward of the batch that starts from ``outputs``; see ``StagedBackwards.before_backward``."""
        self.reducer.tokens.has_loss = has_loss
        self.backwards.prepare(outputs, syncs=is_last)

    def finish_batch(self, batch: DeferredBatch) -> MegastrategyError | None:
        """Ends the batch, and waits for its reductions. Collective over the data-parallel ranks.

        Returns the error with which they reject the gradients, if they do.
        """
        return self.backwards.finish_batch(batch)

    def drop_grads(self) -> None:
        """Drops all gradients."""
        self.reducer.drop()

    def restore_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Sets each ``.grad`` that user code has set to None since it was in ``grads``, by parameter."""
        present = map(get_grad, self.params)
        set_grads(self.params, [grad if now is None else now for now, grad in zip(present, grads, strict=True)])

    def scale_grads(self, factor: Tensor) -> None:
        """Multiplies the reduced gradients of this rank by one number."""
        grads = [grad for bucket in self.reducer.buckets for grad in bucket.final_grads()]
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))

    @property
    def token_factor(self) -> float:
        """The factor of the correction to the mean over tokens; 0.0 if there is none on this rank."""
        return self.reducer.tokens.factor

    def correct_by_tokens(self, factor: float) -> None:
        """Multiplies the reduced gradients by the factor of the stage that has the losses."""
        self.reducer.tokens.scale(self.reducer.buckets, factor)

    # --- the rest -----------------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """The number of steps so far of all optimizers of this model."""
        return sum(optimizer.num_steps_begun for ref in self.optimizers if (optimizer := ref()) is not None)

    def announce(self, log: Callable[[str], None]) -> None:
        """Describes the setup, in lines, through ``log``, which prints on rank 0 only."""
        state_tensors: dict[int, int] | None = {}
        rank_of: dict[int, int] = {}
        groups: dict[int, Hashable] = {}
        for optimizer in (optimizer for ref in self.optimizers if (optimizer := ref()) is not None):
            of_optimizer = optimizer.num_kept()
            if state_tensors is None or of_optimizer is None:
                state_tensors = None
            else:
                state_tensors |= of_optimizer
            rank_of |= optimizer.owners()
            groups |= optimizer.neighbour_groups()
        log(
            describe_setup(
                self.layout,
                self.collectives.rank,
                self.config.overlap_grad_reduce,
                state_tensors if self.has_optimizer else None,
                owners=Owners(self.layout, rank_of),
                device=self.device,
                groups=groups if self.has_optimizer else None,
            )
        )

    def use_for_checkpoints(self, collectives: Collectives) -> None:
        """Uses other collectives for gathering checkpoints from now on, after an exception has left these unusable."""
        self.reducer.abort_unfinished()
        self.collectives = collectives

    def emit(self, kind: EventKind, index: int) -> None:
        """Reports an event to the listener, if there is one."""
        emit(self._listener, kind, index)

    def check_open(self) -> None:
        """Raises ClosedError after :meth:`close`."""
        if self.is_closed:
            raise_closed()

    def close(self) -> None:
        """Restores a plain module: parameters own their memory, hooks are removed, ``.grad`` is None."""
        self.is_closed = True
        try:
            self.gather.finish()
        finally:
            self.gather.remove_hooks()
            self.backwards.close(keeps_grads=self.wrapper() is None)
            withdraw_main_grads(self._declared)
            memory = self.reducer.memory
            if memory is not None and memory.weights is not None:
                memory.weights.restore_params()
            for group in self.model_parallel.groups:
                group.detach()
            self.release_groups()

    def release_groups(self) -> None:
        """Ends threads and, after :meth:`close`, the engine's own process groups, unless an optimizer needs them."""
        self._buffer_collectives.close()
        self.collectives.close()
        optimizers = [optimizer for ref in self.optimizers if (optimizer := ref()) is not None]
        if self.is_closed and not any(optimizer.needs_ranks for optimizer in optimizers):
            for group in self.model_parallel.groups:
                group.close()
            if self._end is not None:
                self._end()
