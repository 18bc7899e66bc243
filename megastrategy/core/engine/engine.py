"""Connects layout, buffers, reducer and gather of one wrapped model, from its wrapping to its closing."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from ..buffers import (
    ContiguousGradBuffers,
    FlattenedGradBuffers,
    GradBuffers,
    ParamBuffers,
    PooledGradBuffers,
    declare_main_grads,
    withdraw_main_grads,
)
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
from ..errors import LayoutMismatchError, MegastrategyError, raise_closed
from ..events import EventKind, Listener, emit
from ..layout import BufferLayout, Domain, Owners, build_layout, describe_setup, find_weight_chunks
from ..module import (
    ModuleWatch,
    agree_on_layout,
    check_memory_is_own,
    check_module,
    check_no_experts,
    close_other_engines,
    common_device,
    find_groups,
    ignored_names,
    named_buffers,
    named_params,
    option_rows,
    param_spec,
)
from ..sync import AcrossReplicas, BackwardWatch, BucketPlanner, DeferredBatch, ParamGather, Reducer, Replicas
from ..trials import KnownFindings
from .relayout import relayout
from .replica_state import ReplicaState, check_supported
from .shard_holder import ShardHolder

_MANY_GROUPS = 8


class Engine:
    """Lays out a module's parameters, and owns the buffers, the reducer and the gather for that layout.

    :class:`~megastrategy.DistributedDataParallel` has one until it is closed; its copies have none. The optimizers of
    the model step through it.

    Args:
        wrapper: the wrapper, which refers to this object. Its ``module`` is read each time, since users replace it. The
            other arguments are the wrapper's, too.
        should_sync: called when a backward starts, returns whether it is synchronised; see
            :meth:`DistributedDataParallel.should_sync <megastrategy.DistributedDataParallel.should_sync>`.

    Attributes:
        wrapper: a weak reference to the wrapper.
        layout: the plan of buffers and shards. It grows when parameters are added, and a move replaces it.
        local_parts: where this rank has parameters and gradients.
        model_parallel: the groups of ranks that share the model with this one.
        params: the trainable parameters, in the order of ``layout.params``.
        index_by_id: ``id(param)`` to the parameter's index in ``params`` and ``layout``.
        param_buffers: None unless parameters are sharded; only then ``param_gather`` exists.
        shard_holders: weak references to the optimizers of this model, in the order of their construction.
        known_findings: results of optimizers' trials; a door may set its own, which outlives this object.
        is_closed: whether :meth:`close` was called.

    Raises:
        ValueError: if the module cannot be laid out.
        LayoutMismatchError: if the ranks' modules or configurations differ.
    """

    param_gather: ParamGather

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
        expert_mesh: DeviceMesh | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.wrapper, self._kind, self._modules = weakref.ref(wrapper), type(wrapper), wrapper._modules
        self.config = config
        self.all_reduce_option = all_reduce_option
        # Before any collective: if a rank rejects its module, the others must not wait for it.
        check_module(self.module, type(wrapper))
        self._ignored = ignored_names(self.module)
        self.device = common_device(self.named_params())
        self.local_parts, self.model_parallel = find_groups(self.module, process_group, expert_mesh, config)
        self._check_parts()
        if replicas is not None:
            check_supported(self, self.model_parallel.groups, self.device)
        self.collectives = self._buffer_collectives = collectives = self._connected(process_group, collectives)
        for group in self.model_parallel.groups:
            group.connect(self.device)
        self.is_closed = False
        self.shard_holders: list[weakref.ref[ShardHolder]] = []
        self.known_findings = KnownFindings()
        self._listener = listener
        self.params: list[Parameter] = []
        self.index_by_id: dict[int, int] = {}
        self.watch = ModuleWatch(self._modules, self._ignored)
        self.layout, joined = self._plan()
        self._add_params(joined)
        self.owners = Owners(self.layout, {})
        # After the ranks have agreed on the layout: broadcasts of different modules would not match.
        self.broadcast_all()
        self.param_buffers: ParamBuffers | None = None
        self._declared = declare_main_grads(self.module)
        try:
            self.grad_buffers = self.make_grad_buffers()
        except ValueError:
            withdraw_main_grads(self._declared)
            raise
        ranks_of = functools.partial(shard_collectives, collectives, device=self.device)  # of these, until the end
        if self.layout.num_shards > 1:
            self.param_buffers = ParamBuffers(self.layout, self.params, self.device, self.local_parts)
            self.param_gather = ParamGather(self.param_buffers, ranks_of, self.module, listener)
            for domain in self.layout.domains:
                self.ranks_of(domain).connect(self.device, exchanges=bool(self.layout.received_nbytes))
            # A forward begins with a broadcast of module buffers, which would wait for gathers in the same queue.
            if config.overlap_param_gather and config.broadcast_buffers and named_buffers(self.module, self._ignored):
                self._buffer_collectives = second_collectives(collectives, self.device)
                self._buffer_collectives.connect(self.device, exchanges=False)
        decides = weakref.WeakMethod(should_sync)  # of the wrapper, which may be collected
        self.reducer = Reducer(
            self.grad_buffers,
            collectives,
            ranks_of,
            config,
            lambda decision: (decide := decides()) is not None and decide(decision),
            BackwardWatch(self),
            listener,
            self._make_planner() if replicas is None else None,  # another order of buckets is another layout
            self.model_parallel.tensor_ranks,
            AcrossReplicas(replicas, ReplicaState(self)) if replicas is not None else None,
        )
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
            own_group = group if group is not process_group else None
            collectives = make_collectives(group, self.device)
            self._end = close_when_collected(self, collectives, own_group)
        # Hazard: collectives that were passed may serve other models, and garbage is collected at any time in any
        # thread. If they were closed with this object, another model's collective would never run.
        return collectives

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes this object None in copies and pickles of objects that refer to it, such as a Trainer during a fit."""
        return type(None), ()

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        module = self._modules["module"]
        assert module is not None, "torch refuses None for a module"
        return module

    @property
    def shard_collectives(self) -> Collectives:
        """``collectives`` for the ranks among which each element has one owner: all ranks, or an instance."""
        return self.ranks_of(self.layout.domain)

    def ranks_of(self, domain: Domain) -> Collectives:
        """Returns the collectives of the ranks that own a domain's buckets."""
        return shard_collectives(self.collectives, domain, self.device)

    @property
    def has_optimizer(self) -> bool:
        """Whether a DistributedOptimizer was made for this model."""
        return bool(self.shard_holders)

    @property
    def sends_under_backward(self) -> bool:
        """Whether buckets are sent to other ranks during backward."""
        return self.collectives.size > 1 and self.config.overlap_grad_reduce

    @property
    def steps_params_themselves(self) -> bool:
        """Whether any torch optimizer may step the Parameters: complete on every rank, and without main params."""
        is_whole = self.layout.num_shards == 1 and not self.local_parts.has_parts
        return is_whole and not any(spec.has_main_param for spec in self.layout.params)

    @property
    def is_in_use(self) -> bool:
        """Whether the wrapper exists, or this is closed already."""
        return self.is_closed or self.wrapper() is not None

    def is_as_wrapped(self) -> bool:
        """Whether the module still has the parameters for which the buffers were laid out; it may have more."""
        present = {id(param) for param in self.named_params().values()}
        return all(
            id(param) in present
            and param.dtype == spec.dtype
            and tuple(self.local_parts.local_view(param).shape) == spec.shape
            for param, spec in zip(self.params, self.layout.params, strict=True)
        )

    def named_params(self) -> dict[str, Parameter]:
        """Returns the module's parameters, frozen ones too, without ignored ones."""
        return named_params(self.module, self._ignored)

    def ignored_params(self) -> set[int]:
        """Returns the ids of ignored parameters, which belong to each rank."""
        if not self._ignored:
            return set()
        return set(map(id, named_params(self.module).values())) - set(map(id, self.named_params().values()))

    def broadcast_all(self) -> None:
        """Broadcasts the module's parameters, frozen ones too, and buffers from rank 0, without ignored ones.
        Collective."""
        tensors = [*self.named_params().values(), *named_buffers(self.module, self._ignored).values()]
        self.model_parallel.broadcast_common(tensors)
        self._broadcast(tensors)

    def _broadcast(self, tensors: Iterable[Tensor], *, unseen: bool = False) -> None:
        """Gives the tensors the values of the first rank that holds the same elements; ``unseen`` by autograd."""
        by_domain: dict[Domain, list[tuple[Tensor, Tensor]]] = {}
        held_by_all: list[Tensor] = []
        for tensor in tensors:
            part = self.local_parts.local_view(tensor)
            part = part.data if unseen else part
            if (domain := self.model_parallel.domain_of(tensor)) is None:
                held_by_all.append(part)
            else:
                # Of one size on all ranks, which have to start the same collectives.
                padded = part.new_zeros(self.local_parts.reserved_numel(tensor))
                padded[: part.numel()] = part.detach().reshape(-1)
                by_domain.setdefault(domain, []).append((part, padded))
        self.collectives.broadcast_all(held_by_all)
        for domain, members in by_domain.items():
            self.ranks_of(domain).broadcast_all([padded for _, padded in members])
            for part, padded in members:
                part.detach().copy_(padded[: part.numel()].view(part.shape))

    def broadcast_buffers(self) -> None:
        """Broadcasts the module's buffers from rank 0, without a trace for autograd. Collective."""
        # .data has a version counter of its own: BatchNorm saves its buffers for backward, and a second forward, or a
        # validation, before that backward must not make autograd refuse it.
        self._buffer_collectives.broadcast_all([buffer.data for buffer in self.watch.buffers()])

    # --- the module changes ------------------------------------------------------------------------------------------

    def check_params(self) -> None:
        """Raises an error for a replaced parameter, and includes unfrozen ones. Cheap enough before every forward."""
        if self.watch.has_changed() and not self.watch.is_overridden():
            # Their errors are more precise than that of the watch.
            check_module(self.module, self._kind)
            self._check_parts()
            self.watch.update(self.params)
        self.reducer.update_swapped_params()
        if any(param.requires_grad for param in self.watch.frozen):
            self.include_trainable()

    def include_trainable(self) -> None:
        """Adds parameters that require gradients now and did not before; collective if there are any.

        The parameters get buffers and buckets of their own, after the others: no other parameter's offset or shard
        changes. Rank 0's values are broadcast, as at the start.
        """
        self.check_open()
        layout, joined = self._plan()
        self._add_params(joined)
        if not joined:
            return
        self.model_parallel.broadcast_common(joined, joins=True)
        # Through .data: a forward may have saved the values for a backward that is still to come.
        self._broadcast(joined, unseen=True)
        self.layout = self.layout.extended_by(layout)
        self.owners = Owners(self.layout, self.owners.rank_of)
        self.grad_buffers.extend(self.layout, self.params)
        if self.param_buffers is not None:
            self.param_buffers.extend(self.layout, self.params)
        self.reducer.extend()
        self.emit(EventKind.LAYOUT_EXTENDED, len(self.params) - len(joined))

    def _plan(self) -> tuple[BufferLayout, list[Parameter]]:
        """Returns the layout of trainable parameters that are not in ``params`` yet, and these parameters.

        Collective: all ranks agree on the layout.
        """
        known = self.index_by_id
        others = [(name, param) for name, param in self.named_params().items() if id(param) not in known]
        joining = [param for _, param in others if param.requires_grad]
        parts, part_of = self.local_parts, self.local_parts.local_view
        whole = [param for param in joining if part_of(param) is param]
        # Addresses of weights differ between ranks, and tensor ranks have one layout.
        chunks = find_weight_chunks(self.module, whole, self.config) if self.model_parallel.tensor_ranks is None else {}
        specs = [
            dataclasses.replace(
                param_spec(name, part_of(param), self.config, chunks.get(id(param))),
                reserved_numel=parts.reserved_numel(param),
                needs_own_bucket=any(group.needs_own_bucket(param) for group in self.model_parallel.groups),
                domain=self.model_parallel.domain_of(param),
            )
            for name, param in others
            if param.requires_grad
        ]
        layout = build_layout(specs, self.config, self.collectives.size)
        if joining or not known:
            check_module(self.module, self._kind)
            common_device(self.named_params())
            if self.collectives.size > 1:
                check_no_experts(self.named_params(), self.local_parts)
            close_other_engines(joining)
            if layout.num_shards > 1:  # otherwise parameters do not move, and shared memory stays shared
                check_memory_is_own(self.module, joining, self.local_parts, self.all_reduce_option)
            sent = named_buffers(self.module, self._ignored) if not known else {}
            layout = agree_on_layout(layout, self.config, self.collectives, sent)
            for group in self.model_parallel.groups:
                group.check_ranks_agree(dict(others), option_rows(self.config), layout.describe_places())
        return layout, joining

    def _add_params(self, params: Sequence[Parameter]) -> None:
        self.params += params
        self.index_by_id = {id(param): index for index, param in enumerate(self.params)}
        self.watch.update(self.params)

    # --- whole parameters --------------------------------------------------------------------------------------------

    def assign_owners(self, indices: set[int]) -> None:
        """Assigns owners to parameters that are stepped unsharded. Collective, with the same parameters on all ranks.

        Raises:
            LayoutMismatchError: if owners differ between ranks, as with different optimizers.
        """
        if joining := indices - self.owners.rank_of.keys():
            self.owners = self.owners.extended_by(joining)
        every = self.collectives.all_gather_objects(sorted(self.owners.rank_of.items()))
        if any(others != every[0] for others in every):
            raise LayoutMismatchError(
                "ranks disagree on which parameters are stepped whole: their optimizers have different groups or "
                f"options. The number of these parameters by rank: {[len(others) for others in every]}"
            )

    # --- the layout changes ------------------------------------------------------------------------------------------

    def _make_planner(self) -> BucketPlanner | None:
        # If nothing is sent before the end of backward, the order of buckets makes no difference.
        if not self.params or not self.sends_under_backward:
            return None
        return BucketPlanner(self.config, self.collectives, self.model_parallel.tensor_ranks)

    def move_to(self, layout: BufferLayout | None) -> None:
        """Moves everything to another layout; nothing happens for None. Collective."""
        if layout is not None:
            relayout(self, layout)

    def announce(self, log: Callable[[str], None]) -> None:
        """Describes the setup, in lines, through ``log``, which prints on rank 0 only."""
        kept: dict[int, int] | None = {}
        for holder in (ref() for ref in self.shard_holders):
            found = holder.num_kept() if holder is not None else {}
            kept = None if kept is None or found is None else kept | found
        log(
            describe_setup(
                self.layout,
                self.collectives.rank,
                self.config.overlap_grad_reduce,
                kept if self.has_optimizer else None,
                owners=self.owners,
                device=self.device,
            )
        )

    def make_grad_buffers(self) -> GradBuffers:
        """Returns buffers for the present layout, with the parameters' present gradients."""
        kind: type[GradBuffers] = PooledGradBuffers if self.layout.is_pooled else ContiguousGradBuffers
        if not self.config.use_contiguous_buffers:
            kind = FlattenedGradBuffers
        buffers = kind(self.collectives.rank, self.device, self.local_parts)
        buffers.extend(self.layout, self.params)
        buffers.all_reduce_option = self.all_reduce_option
        return buffers

    def use_for_checkpoints(self, collectives: Collectives) -> None:
        """Uses other collectives for gathering checkpoints from now on, after an exception has left these unusable.

        Reducer and gather keep the old ones: there is no more training.
        """
        self.reducer.abort_unfinished()
        self.collectives = collectives

    # --- gradients ---------------------------------------------------------------------------------------------------

    def on_backward_start(self) -> None:
        """Called when the outermost graph of a backward has begun."""
        self.reducer.on_backward_start()

    def on_backward_end(self) -> None:
        """Called when a graph has ended: gradients are reduced, or accumulate."""
        self.move_to(self.reducer.on_backward_end())

    def drop_unfinished(self) -> None:
        """Drops the gradients of backwards that raised, and the losses that were counted for them."""
        self.reducer.drop_unfinished()
        self.reducer.tokens.drop_arrived()

    def finish_grad_sync(self) -> None:
        """See :meth:`Reducer.finish_grad_sync`. Collective."""
        self.move_to(self.reducer.finish_grad_sync())

    @property
    def num_steps(self) -> int:
        """The number of steps so far of all optimizers of this model."""
        return sum(holder.num_steps_begun for ref in self.shard_holders if (holder := ref()) is not None)

    def zero_grads(self, indices: Iterable[int], *, set_to_none: bool) -> None:
        """Drops, or zeroes, the gradients of parameters, unless a group of the model keeps them."""
        if any(group.takes_zero_grad() for group in self.model_parallel.groups):
            return
        if set_to_none:
            self.grad_buffers.clear(indices)
        else:
            self.grad_buffers.zero(indices)

    # --- batches of several backwards --------------------------------------------------------------------------------
    # A pipeline runs all backwards of a batch inside of its forward, and calls these methods.

    def begin_batch(self, batch: DeferredBatch) -> None:
        """Drops all gradients, and begins a batch: its reductions are waited for in :meth:`finish_batch`."""
        self.drop_grads()
        self.reducer.begin_batch(batch)

    def prepare_backward(self, outputs: Any, *, is_last: bool, has_loss: bool) -> None:
        """Prepares a backward of the batch that starts from ``outputs``; see ``StagedBackwards.before_backward``."""
        self.reducer.tokens.has_loss = has_loss
        self.reducer.backwards.reset()
        self.reducer.prepare(outputs, sync=is_last)

    def finish_batch(self, batch: DeferredBatch) -> MegastrategyError | None:
        """Ends the batch, and waits for its reductions. Collective over the data-parallel ranks.

        Returns the error with which they reject the gradients, if they do.
        """
        copies = next(group for group in self.model_parallel.groups if group.state is not None)
        wanted, refusal = self.reducer.finish_batch(batch, copies)
        self.move_to(wanted)
        return refusal

    def drop_grads(self) -> None:
        """Drops all gradients."""
        self.grad_buffers.clear(range(len(self.grad_buffers.params)))

    def restore_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Sets each ``.grad`` that user code has set to None since it was in ``grads``, by parameter."""
        self.grad_buffers.restore_grads(grads)

    def scale_grads(self, factor: Tensor) -> None:
        """Multiplies the reduced gradients of this rank by one number."""
        grads = self.grad_buffers.local_grads(range(len(self.params)))
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))

    @property
    def token_factor(self) -> float:
        """The factor of the correction to the mean over tokens; 0.0 if there is none on this rank."""
        return self.reducer.tokens.factor

    def correct_by_tokens(self, factor: float) -> None:
        """Multiplies the reduced gradients by the factor of the stage that has the losses."""
        self.reducer.tokens.scale(factor)

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish_param_gather(self) -> None:
        """Waits for the parameters whose gather is under way since the last step."""
        if self.param_buffers is not None:
            self.param_gather.finish()

    def emit(self, kind: EventKind, index: int) -> None:
        """Reports an event to the listener, if there is one."""
        emit(self._listener, kind, index)

    def check_open(self) -> None:
        """Raises ClosedError after :meth:`close`."""
        if self.is_closed:
            raise_closed()

    def close(self) -> None:
        """Restores a plain module: parameters own their memory, hooks are removed, ``.grad`` is None.

        Optimizers are given back at their next use; see plain_optimizer's [Note: what close() does to an optimizer].
        """
        self.is_closed = True
        try:
            self.finish_param_gather()
        finally:
            self.reducer.close()
            self.grad_buffers.close(keeps_grads=self.wrapper() is None)
            withdraw_main_grads(self._declared)
            if self.param_buffers is not None:
                self.param_buffers.restore_params()
                self.param_buffers = None
            for group in self.model_parallel.groups:
                group.detach()
            self.release_groups()

    def release_groups(self) -> None:
        """Ends threads and, after :meth:`close`, the engine's own process groups, unless an optimizer needs them."""
        self._buffer_collectives.close()
        self.collectives.close()
        holders = [holder for ref in self.shard_holders if (holder := ref()) is not None]
        if self.is_closed and not any(holder.needs_ranks for holder in holders):
            for group in self.model_parallel.groups:
                group.close()
            if self._end is not None:
                self._end()
