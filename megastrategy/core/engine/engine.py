"""The moving parts of one wrapped model, from its wrapping to its closing."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.distributed import ProcessGroup
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
from ..errors import LayoutMismatchError, NotOnAllRanksError, raise_closed
from ..events import Event, EventKind, Listener
from ..layout import BufferLayout, Owners, build_layout, describe_setup, find_weight_chunks
from ..module import (
    ModuleWatch,
    agree_on_layout,
    broadcast_params,
    check_are_equal,
    check_memory_is_own,
    check_module,
    check_no_experts,
    collect_garbage,
    common_device,
    find_groups,
    ignored_names,
    named_buffers,
    named_params,
    option_rows,
    param_spec,
    take_over,
)
from ..sync import BackwardWatch, BucketPlanner, ParamGather, Reducer
from ..trials import KnownFindings
from .relayout import relayout
from .shard_holder import ShardHolder

_MANY_GROUPS = 8
GiveBack: TypeAlias = Literal["all", "used", "later"]


class Engine:
    """Lays a module's parameters out, and owns the buffers, the reducer and the gather for that layout.

    :class:`~megastrategy.DistributedDataParallel` has one until it is closed; its copies have none. The optimizers of
    the model step through it.

    Args:
        wrapper: the wrapper, which has this object. Its ``module`` is asked for anew each time, since users replace it.
        process_group: the data-parallel ranks; None for all. The engine makes a group of its own over the same ranks.
        collectives: how to send instead of what fits the group.
        should_sync: asked when a backward starts whether it is synchronised; see
            :meth:`DistributedDataParallel.should_sync <megastrategy.DistributedDataParallel.should_sync>`.
        all_reduce_option: how the user asks for an all-reduce instead, for errors whose way out it is.

    Attributes:
        wrapper: a weak reference to the wrapper.
        layout: the plan that buffers and shards follow. It grows when parameters join, and is another after a move.
        local_parts: where this rank has parameters and gradients; tensor-parallel ones in part.
        model_parallel: the groups of ranks that share the model with this one.
        params: the trainable parameters, in the order of ``layout.params``.
        index_by_id: ``id(param)`` to the parameter's index in ``params`` and ``layout``.
        param_buffers: None where nothing is sharded; ``param_gather`` exists with it alone.
        shard_holders: the optimizers made for this model, in the order of their making; dead references stay.
        known_findings: the results of optimizers' trials; a door puts its own here, which outlives this object.
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
    ) -> None:
        self.wrapper, self._kind, self._modules = weakref.ref(wrapper), type(wrapper), wrapper._modules
        self.config = config
        self.all_reduce_option = all_reduce_option
        # before any collective: a rank that refuses its module must not leave others waiting in one for it alone
        check_module(self.module, type(wrapper))
        self._ignored = ignored_names(self.module)
        self.device = common_device(self.named_params())
        self.local_parts, self.model_parallel = find_groups(self.module, process_group)
        self._check_parts()
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
        self._take_in(joined)
        self.owners = Owners(self.layout, {})
        # after the ranks agreed on the layout: broadcasts of other modules would not match one another
        self.broadcast_all()
        self.param_buffers: ParamBuffers | None = None
        self._declared = declare_main_grads(self.module)
        try:
            self.grad_buffers = self._make_grad_buffers()
        except ValueError:
            withdraw_main_grads(self._declared)
            raise
        if self.layout.num_shards > 1:
            self.param_buffers = ParamBuffers(self.layout, self.params, self.device, self.local_parts)
            self.param_gather = ParamGather(self.param_buffers, self.shard_collectives, self.module, listener)
            self.shard_collectives.connect(self.device, exchanges=bool(self.layout.received_nbytes))
            # A forward begins with the module's buffers, and weights that come under it would all come before them.
            if (
                config.overlap_param_gather == "forward"
                and config.broadcast_buffers
                and named_buffers(self.module, self._ignored)
            ):
                self._buffer_collectives = second_collectives(collectives, self.device)
                self._buffer_collectives.connect(self.device, exchanges=False)
        decides = weakref.WeakMethod(should_sync)  # of the wrapper, which may be dropped
        self.reducer = Reducer(
            self.layout,
            self.params,
            self.grad_buffers,
            collectives,
            self.shard_collectives,
            config,
            lambda decision: (decide := decides()) is not None and decide(decision),
            BackwardWatch(self),
            listener,
            self._make_planner(),
            self.model_parallel.tensor_ranks,
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
            # Each has threads and descriptors, and those of a model that was dropped in a circle of references end when
            # that is collected.
            if num_private_groups() >= _MANY_GROUPS:
                collect_garbage()
            group = private_group(process_group, self.device)
            own_group = group if group is not process_group else None
            collectives = make_collectives(group, self.device)
            self._end = close_when_collected(self, collectives, own_group)
        # Hazard: collectives that were passed serve other models too, and garbage is collected at any time in any
        # thread. If they ended with this object, another model's collective would never be carried out.
        return collectives

    def __reduce__(self) -> tuple[Any, ...]:
        """Becomes None in copies and pickles of what holds it, such as a Trainer in mid-fit."""
        return type(None), ()

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        module = self._modules["module"]
        assert module is not None, "torch refuses None for a module"
        return module

    @property
    def shard_collectives(self) -> Collectives:
        """``collectives`` seen by the ranks that each element has one owner among: all, or an instance of them."""
        return shard_collectives(self.collectives, self.layout.num_shards, self.device)

    @property
    def has_optimizer(self) -> bool:
        """Whether a DistributedOptimizer was made for this model."""
        return bool(self.shard_holders)

    @property
    def sends_under_backward(self) -> bool:
        """Whether buckets are sent to other ranks while backward goes on."""
        return self.collectives.size > 1 and self.config.overlap_grad_reduce

    @property
    def steps_params_themselves(self) -> bool:
        """Whether any torch optimizer may step the Parameters: whole on every rank, and without main params."""
        is_whole = self.layout.num_shards == 1 and not self.local_parts.has_parts
        return is_whole and not any(spec.has_main_param for spec in self.layout.params)

    @property
    def is_in_use(self) -> bool:
        """Whether the wrapper is there, or this is closed already."""
        return self.is_closed or self.wrapper() is not None

    def is_as_wrapped(self) -> bool:
        """Whether the module still has the parameters that the buffers were laid out for; others may have joined."""
        present = {id(param) for param in self.named_params().values()}
        return all(
            id(param) in present
            and param.dtype == spec.dtype
            and tuple(self.local_parts.local_view(param).shape) == spec.shape
            for param, spec in zip(self.params, self.layout.params, strict=True)
        )

    def named_params(self) -> dict[str, Parameter]:
        """The module's parameters, frozen ones too, without those that are each rank's own."""
        return named_params(self.module, self._ignored)

    def ignored_params(self) -> set[int]:
        """The parameters that are each rank's own, by id."""
        if not self._ignored:
            return set()
        return set(map(id, named_params(self.module).values())) - set(map(id, self.named_params().values()))

    def broadcast_all(self) -> None:
        """The module's parameters, frozen ones too, and buffers become rank 0's, but those that are each rank's own.
        Collective."""
        params = broadcast_params(self.module, self._ignored)
        if self.layout.num_shards > 1 and self._ignored:
            check_are_equal(self.named_params(), params, self.collectives)
        tensors = [*params, *named_buffers(self.module, self._ignored).values()]
        self.model_parallel.broadcast_common(tensors)
        self.collectives.broadcast_all([self.local_parts.local_view(tensor) for tensor in tensors])

    def broadcast_buffers(self) -> None:
        """The module's buffers become rank 0's, unseen by autograd. Collective."""
        # .data has a version counter of its own: BatchNorm saves its buffers for backward, and a second forward, or a
        # validation, before that backward must not make autograd refuse it.
        self._buffer_collectives.broadcast_all([buffer.data for buffer in self.watch.buffers()])

    # --- the module changes ------------------------------------------------------------------------------------------

    def check_params(self) -> None:
        """Refuses a parameter that was replaced, and takes in what was unfrozen: cheap, before every forward."""
        if self.watch.has_changed():
            # the module's own check may know more of what came in a parameter's place
            check_module(self.module, self._kind)
            self._check_parts()
            self.watch.look(self.params)
        self.reducer.update_swapped_params()
        if any(param.requires_grad for param in self.watch.frozen):
            self.include_trainable()

    def include_trainable(self) -> None:
        """Takes in the parameters that require gradients now and did not before, so that they are synchronised.

        Every forward that trains begins with it. They get buffers and buckets of their own, after the others: no
        other parameter's place or shard changes. Rank 0's values are broadcast, as at the start. Collective if there
        are any, so all ranks unfreeze the same parameters between the same two forwards.
        """
        self.check_open()
        layout, joined = self._plan()
        self._take_in(joined)
        if not joined:
            return
        self.model_parallel.broadcast_common(joined, joins=True)
        # Unseen by autograd: the values are those of a forward whose backward may still come.
        self.collectives.broadcast_all([self.local_parts.local_view(param).data for param in joined])
        self.layout = self.layout.extended_by(layout)
        self.owners = Owners(self.layout, self.owners.rank_of)
        self.grad_buffers.extend(self.layout, self.params)
        if self.param_buffers is not None:
            self.param_buffers.extend(self.layout, self.params)
        self.reducer.extend(self.layout, self.params)
        self.emit(EventKind.LAYOUT_EXTENDED, len(self.params) - len(joined))

    def _plan(self) -> tuple[BufferLayout, list[Parameter]]:
        """Returns the layout of the trainable parameters that are not in ``params`` yet, and these; all ranks agree."""
        known = self.index_by_id
        others = [(name, param) for name, param in self.named_params().items() if id(param) not in known]
        joining = [param for _, param in others if param.requires_grad]
        parts, part_of = self.local_parts, self.local_parts.local_view
        whole = [param for param in joining if part_of(param) is param]
        # Where weights happen to lie is each rank's own, and tensor ranks have one layout.
        chunks = find_weight_chunks(self.module, whole, self.config) if self.model_parallel.tensor_ranks is None else {}
        specs = [
            dataclasses.replace(
                param_spec(name, part_of(param), self.config, chunks.get(id(param))),
                reserved_numel=parts.reserved_numel(param),
                needs_own_bucket=any(group.needs_own_bucket(param) for group in self.model_parallel.groups),
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
            take_over(joining)
            is_sharded = layout.num_shards > 1
            check_memory_is_own(self.module, joining, self.local_parts, self.all_reduce_option, sharded=is_sharded)
            layout = agree_on_layout(layout, self.config, self.collectives)
            for group in self.model_parallel.groups:
                group.check_ranks_agree(dict(others), option_rows(self.config), layout.describe_places())
        return layout, joining

    def _take_in(self, params: Sequence[Parameter]) -> None:
        self.params += params
        self.index_by_id = {id(param): index for index, param in enumerate(self.params)}
        self.watch.look(self.params)

    # --- whole parameters --------------------------------------------------------------------------------------------

    def own_whole(self, indices: set[int]) -> None:
        """Gives parameters owners, which keep them from now on. Collective; the same on all ranks.

        Raises:
            LayoutMismatchError: if ranks would have other owners, as with other optimizers.
        """
        if joining := indices - self.owners.rank_of.keys():
            self.owners = self.owners.extended_by(joining)
            if self.param_buffers is not None:
                # Equal parts came so far, and stayed; parts with gaps will be added where they were not overwritten.
                self.param_gather.finish()
                self.param_buffers.clear_changes()
        every = self.collectives.all_gather_objects(sorted(self.owners.rank_of.items()))
        if any(others != every[0] for others in every):
            raise LayoutMismatchError(
                "ranks would step other parameters whole: their optimizers have other groups or options. By rank, the "
                f"number of parameters: {[len(others) for others in every]}"
            )

    # --- the layout changes ------------------------------------------------------------------------------------------

    def _make_planner(self) -> BucketPlanner | None:
        # Where nothing is sent before the end of backward, buckets in another order are sent no earlier.
        if not self.params or not self.sends_under_backward:
            return None
        return BucketPlanner(self.config, self.collectives, self.model_parallel.tensor_ranks)

    def move_to(self, layout: BufferLayout | None) -> None:
        """Moves everything to another layout, or nothing for None. Collective."""
        if layout is not None:
            relayout(self, layout)

    def announce(self, tell: Callable[[str], None]) -> None:
        """Tells the user what was set up: ``tell`` gets the lines, and shows them on rank 0."""
        kept: dict[int, int] | None = {}
        for holder in (ref() for ref in self.shard_holders):
            found = holder.num_kept() if holder is not None else {}
            kept = None if kept is None or found is None else kept | found
        tell(
            describe_setup(
                self.layout,
                self.collectives.rank,
                self.config.overlap_grad_reduce,
                kept if self.has_optimizer else None,
                has_receive_buffers=self.collectives.has_receive_buffers,
                owners=self.owners,
                device=self.device,
            )
        )

    def _make_grad_buffers(self) -> GradBuffers:
        """Buffers for the present layout, which take the parameters' gradients in."""
        kind: type[GradBuffers] = PooledGradBuffers if self.layout.is_pooled else ContiguousGradBuffers
        if not self.config.use_contiguous_buffers:
            kind = FlattenedGradBuffers
        buffers = kind(self.collectives.rank, self.device, self.local_parts)
        buffers.extend(self.layout, self.params)
        buffers.all_reduce_option = self.all_reduce_option
        return buffers

    def change_whole(self, layout: BufferLayout) -> None:
        """Changes to another layout of the same parameters where nothing is sharded; gradients are copied."""
        before = self.grad_buffers
        self.layout = layout
        self.grad_buffers = self._make_grad_buffers()
        self.grad_buffers.keep_views_of(before)

    def change_shards(self, layout: BufferLayout, reduced: Mapping[int, Tensor]) -> None:
        """Changes to another layout of the same parameters where this rank owns shards.

        Args:
            reduced: by parameter, this rank's part of the reduced gradient in ``layout``, flat.
        """
        before = self.grad_buffers
        memory = before.close_and_return_memory()
        self.layout = layout
        # CUDA's allocator gives a freed block to what has its size. So weights wait in the gradients' memory until that
        # of the old weights is free: new weights take it, and new gradients take the old gradients'. New weights that
        # stayed in a block of gradients would make the allocator reserve one more.
        if ParamBuffers.can_hold(layout, memory):
            self._follow_params(ParamBuffers(layout, self.params, self.device, self.local_parts, memory))
        else:
            memory = []
        self._follow_params(ParamBuffers(layout, self.params, self.device, self.local_parts))
        del memory
        self.owners = Owners(self.layout, self.owners.rank_of)
        self.grad_buffers = self._make_grad_buffers()
        self.grad_buffers.continue_from(before, reduced)

    def _follow_params(self, buffers: ParamBuffers) -> None:
        self.param_buffers = buffers
        self.param_gather.follow(buffers)

    def save_over(self, collectives: Collectives) -> None:
        """Gathers what is saved from now on over other collectives, since an exception left these unusable.

        Reducer and gather keep theirs: nothing is trained any more.
        """
        self.reducer.abort_unfinished()
        self.collectives = collectives

    # --- gradients ---------------------------------------------------------------------------------------------------

    def on_backward_start(self) -> None:
        """The outermost graph of a backward has begun."""
        self.reducer.on_backward_start()

    def on_backward_end(self) -> None:
        """A graph has ended: gradients are reduced, or accumulate."""
        self.move_to(self.reducer.on_backward_end())

    def drop_unfinished(self) -> None:
        """Drops the gradients of backwards that raised, and the losses that they have counted."""
        self.reducer.drop_unfinished()
        self.reducer.tokens.drop_arrived()

    def finish_grad_sync(self) -> None:
        """See :meth:`Reducer.finish_grad_sync`. Collective."""
        self.move_to(self.reducer.finish_grad_sync())

    @property
    def num_steps(self) -> int:
        """Steps so far of the optimizers that were made for this model."""
        return sum(holder.num_steps_begun for ref in self.shard_holders if (holder := ref()) is not None)

    def zero_grads(self, indices: Iterable[int], *, set_to_none: bool) -> None:
        """Drops, or zeroes, the gradients of parameters, unless a group of the model keeps them."""
        if any(group.takes_zero_grad() for group in self.model_parallel.groups):
            return
        if set_to_none:
            self.grad_buffers.clear(indices)
        else:
            self.grad_buffers.zero(indices)

    def owned_grad(self, index: int) -> Tensor | None:
        """This rank's part of a reduce-scattered gradient, a view; None if all of it is other ranks'."""
        owned = self.layout.owned_range(index, self.collectives.rank)
        return None if owned is None else self.grad_buffers.reduced(self.layout.slots[index].bucket, *owned)

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish_param_gather(self) -> None:
        """Waits for the parameters that the last step left on their way."""
        if self.param_buffers is not None:
            self.param_gather.finish()

    def emit(self, kind: EventKind, index: int) -> None:
        """Tells the listener, if there is one."""
        if self._listener is not None:
            self._listener(Event(kind, index))

    def check_open(self) -> None:
        """Raises ClosedError after :meth:`close`."""
        if self.is_closed:
            raise_closed()

    def close(self, give_back: GiveBack) -> None:
        """Leaves a plain module: parameters own their memory, hooks are gone, ``.grad`` is None.

        ``give_back``: which optimizers; see plain_optimizer's [Note: what close() does to an optimizer].
        """
        self.is_closed = True
        try:
            self.finish_param_gather()
            if give_back != "later" and sys.exception() is None:
                self._give_back(used=give_back == "used")
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

    def _give_back(self, *, used: bool) -> None:
        """Gives the optimizers back that all ranks have, if all ranks close this model; with ``used`` those that user
        code of any rank refers to, without those of main params, which a file that is saved later has exactly."""
        holders = [ref() for ref in self.shard_holders]
        missing = [holder is None for holder in holders]
        wanted = [
            holder is not None and (not used or (holder.is_used_elsewhere and not holder.has_state_of_main_params))
            for holder in holders
        ]
        if holders and self.layout.num_shards > 1:
            try:
                self.collectives.require_all_ranks("close() of a model with a sharded optimizer")
            except NotOnAllRanksError:
                return
            agreed = list(map(bool, self.collectives.max_of_bytes([*missing, *wanted])))
            missing, wanted = agreed[: len(holders)], agreed[len(holders) :]
        for holder, is_missing, is_wanted in zip(holders, missing, wanted, strict=True):
            if holder is not None and is_wanted and not is_missing:
                holder.give_back()

    def release_groups(self) -> None:
        """Ends threads and, after :meth:`close`, the groups of this engine's own, if no optimizer needs them."""
        self._buffer_collectives.close()
        self.collectives.close()
        holders = [holder for ref in self.shard_holders if (holder := ref()) is not None]
        if self.is_closed and not any(holder.needs_ranks for holder in holders):
            for group in self.model_parallel.groups:
                group.close()
            if self._end is not None:
                self._end()
