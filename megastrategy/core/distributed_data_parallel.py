"""The wrapped module: wires layout, buffers, reducer and gather together, and behaves like torch DDP to its user."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from .buffers import ContiguousGradBuffers, GradBuffers
from .callers import check_not_a_stage, check_not_inside_torch_ddp
from .clip_grads import norms_over_owners
from .collectives import Collectives, make_collectives
from .collectives.instanced import destroy_instances, shard_collectives
from .collectives.process_groups import destroy_group, private_group
from .config import DistributedDataParallelConfig
from .errors import ClosedError
from .events import Event, EventKind, Listener
from .flattened_buffers import FlattenedGradBuffers
from .layout import BufferLayout, build_layout
from .module_plan import check_memory_is_own, check_module, check_ranks_agree, common_device, param_spec
from .module_watch import ModuleWatch
from .param_buffers import ParamBuffers
from .param_gather import ParamGather
from .pooled_buffers import PooledGradBuffers
from .rebucketing.planner import BucketPlanner
from .rebucketing.relayout import ShardHolder, relayout
from .rebucketing.tuning import BucketSizeTuner
from .reduced_grad import inside_backward
from .reducer import Reducer
from .trials.known_findings import KnownFindings


class DistributedDataParallel(nn.Module):
    """Data parallelism after Megatron-LM around any module.

    Args:
        module: on its device already, the same on every rank; rank 0's parameters and buffers are broadcast. Parameters
            that require no gradients now are left out.
        config: the options; None for the defaults.
        process_group: the data-parallel ranks; None for all. The engine makes a group of its own over the same ranks.
        collectives: how to send instead of what fits the group (for tests and measurements).
        listener: called with every :class:`~megastrategy.core.events.Event`.
        all_reduce_option: how the user of this object asks for an all-reduce instead, for errors whose way out it is.

    Hooks of your own on a parameter's accumulated gradient (``register_post_accumulate_grad_hook``) run before the
    gradient is sent if they are registered before wrapping.

    With the distributed optimizer the parameters' memory moves into a contiguous buffer that this object owns;
    :meth:`close` gives it back. At the end of the first synchronised backward it may move once more (see
    rebucketing.planner's [Note: buckets in the order seen]): what was taken of it before (``p.data``,
    ``p.detach()``, an address) is then not the parameter's any more. With ``overlap_grad_reduce=False`` and a fixed
    ``bucket_size`` it never moves.

    A copy (``deepcopy``, pickle) is closed from the start: it holds a copy of the module in memory of its own, and no
    engine. A closed wrapper evaluates its module, and refuses to train it.

    Attributes:
        module: the wrapped module.
        on_message: gets what the engine has to say to the user (on rank 0: why a bucket size was chosen); None for the
            logger "megastrategy", at level INFO.
        known_findings: what trials of optimizers showed; a door puts its own here, which outlives this object.
        has_optimizer: whether a DistributedOptimizer was made for it.
        shard_holders: those that were, in the order of their making; a dead reference for one that is gone.
        require_backward_grad_sync: whether the next backward is synchronised; see :meth:`no_sync`.

    Raises:
        ValueError: if the module cannot be laid out (parameters on several devices, on meta, uninitialised, or
            DTensors), or has a module in it that torch DDP wraps.
        LayoutMismatchError: if the ranks' modules or configurations differ.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        process_group: ProcessGroup | None = None,
        *,
        collectives: Collectives | None = None,
        listener: Listener | None = None,
        all_reduce_option: str = "DistributedDataParallelConfig(use_distributed_optimizer=False)",
    ) -> None:
        super().__init__()
        self.module = module
        self.all_reduce_option = all_reduce_option
        self.known_findings = KnownFindings()
        self.is_closed = False
        self.config = config = config or DistributedDataParallelConfig()
        check_module(module, DistributedDataParallel)
        self.device = common_device(module)
        self._own_group: ProcessGroup | None = None
        if collectives is None:
            group = private_group(process_group, self.device)
            self._own_group = group if group is not process_group else None
            collectives = make_collectives(group, self.device)
        self.collectives = collectives
        self._listener = listener
        self.params: list[Parameter] = []
        self.index_by_id: dict[int, int] = {}  # id(param) -> its index in params and in the layout
        self._watch = ModuleWatch(self._modules)
        self.layout = self._plan()
        collectives.broadcast_all([*module.parameters(), *module.buffers()])
        self.param_buffers: ParamBuffers | None = None
        self.grad_buffers = self.make_grad_buffers()
        if self.layout.num_shards > 1:
            self.param_buffers = ParamBuffers(self.layout, self.params, self.device)
            self.param_gather = ParamGather(self.param_buffers, self.shard_collectives, module, listener)
        self.has_optimizer = False
        self.on_message: Callable[[str], None] | None = None
        self.shard_holders: list[weakref.ref[ShardHolder]] = []
        self.require_backward_grad_sync = True
        self._buffers_differ = True  # whether module buffers may have changed since they were last broadcast
        self.reducer = Reducer(
            self.layout,
            self.params,
            self.grad_buffers,
            collectives,
            self.shard_collectives,
            config,
            self.should_sync,
            listener,
            self._make_planner() if collectives.size > 1 and self.params else None,
        )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in _ENGINE} | {"is_closed": True}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; broadcasts its buffers first where torch DDP would."""
        training = torch.is_grad_enabled()
        if self.is_closed:
            if self.training and training:
                self.check_open()
            return self.module(*args, **kwargs)
        self.emit(EventKind.FORWARD_START, int(training))
        if training and not inside_backward():  # inside, it is recomputed by a checkpoint around the whole wrapper
            check_not_inside_torch_ddp(self)
            if self.collectives.size > 1:
                reduced_by_step = self.layout.num_shards > 1 and not self.layout.is_pooled and self.has_optimizer
                check_not_a_stage(self, stays_local=reduced_by_step and not self.require_backward_grad_sync)
            self.reducer.before_forward()
            self._check_params()
        if self.param_buffers is not None:
            self.param_gather.before_forward()
        if self._buffers_differ and self.config.broadcast_buffers:
            self.collectives.broadcast_all(self._watch.buffers())
        outputs = self.module(*args, **kwargs)
        sync = self.require_backward_grad_sync
        self._buffers_differ = training and sync
        if training:
            self.reducer.after_forward(outputs, sync)
        self.emit(EventKind.FORWARD_END, int(training))
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forward and backward inside are accumulated and not sent, as under torch DDP's ``no_sync``.

        With ``grad_buffer="pooled"`` they are sent all the same, and accumulate in the shards.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def should_sync(self, decision: bool | None) -> bool:
        """Whether the backward that starts now is synchronised.

        Args:
            decision: of the last forward; None if no forward of this object has ended since the last backward began.
        """
        return self.require_backward_grad_sync if decision is None else decision

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: torch DDP's way to train on with the ranks that have batches left."""
        raise NotImplementedError(_NO_JOIN.format("join"))

    def join_hook(self, **_: Any) -> NoReturn:
        """What ``torch.distributed.algorithms.Join`` asks for; refused as :meth:`join` is."""
        raise NotImplementedError(_NO_JOIN.format("join_hook"))

    def watch_backward(self, outputs: Any) -> None:
        """Tells the engine that a backward may start from these tensors, where they are not what ``forward`` returns.

        Needed only for re-entrant checkpoints, with a loss that the forward did not return.
        """
        self.check_open()
        self.reducer.watch(outputs)

    def finish_param_gather(self) -> None:
        """Waits for the parameters that the last step left on their way, with ``overlap_param_gather="forward"``.

        Whoever reads a parameter waits for it anyhow. What cannot is code that has its memory by other means: a view
        or detached tensor taken before the step, torch.func's transforms, torch.jit. Call this before such code.

        Raises:
            CollectiveError: if a gather failed, most often because another rank ended.
        """
        if self.param_buffers is not None:
            self.param_gather.finish()

    def leave_buffers_apart(self) -> None:
        """What the last forward left in the module's buffers stays each rank's own: the next one does not broadcast."""
        self._buffers_differ = False

    def include_trainable(self) -> None:
        """Takes in the parameters that require gradients now and did not before, so that they are synchronised.

        Every forward that trains begins with it. They get buffers and buckets of their own, after the others: no
        other parameter's place or shard changes. Rank 0's values are broadcast, as at the start. Collective if there
        are any, so all ranks unfreeze the same parameters between the same two forwards.
        """
        self.check_open()
        known = len(self.params)
        layout = self._plan()
        if len(self.params) == known:
            return
        joined = self.params[known:]
        self.collectives.broadcast_all(joined)
        self.layout = self.layout.extended_by(layout)
        self.grad_buffers.extend(self.layout, self.params)
        if self.param_buffers is not None:
            self.param_buffers.extend(self.layout, self.params)
        self.reducer.extend(self.layout, self.params)
        self.emit(EventKind.LAYOUT_EXTENDED, known)

    @property
    def shard_collectives(self) -> Collectives:
        """``collectives`` seen by the ranks that each element has one owner among: all, or an instance of them."""
        return shard_collectives(self.collectives, self.layout.num_shards, self.device)

    @property
    def has_local_grads(self) -> bool:
        """Whether gradients were accumulated that no reduction has been started for, as under :meth:`no_sync`."""
        return self.reducer.has_local_grads

    def is_as_wrapped(self) -> bool:
        """Whether the module still has the parameters that the buffers were laid out for; others may have joined."""
        present = {id(param) for param in self.module.parameters()}
        return all(
            id(param) in present and param.dtype == spec.dtype and tuple(param.shape) == spec.shape
            for param, spec in zip(self.params, self.layout.params, strict=True)
        )

    def steps_params_themselves(self) -> bool:
        """Whether any torch optimizer may step the Parameters: whole on every rank, and without main params."""
        return self.layout.num_shards == 1 and not any(spec.has_main_param for spec in self.layout.params)

    @property
    def microbatch(self) -> int:
        """The number of the microbatch in work, if whoever runs the loop counts them.

        Compared between ranks at the end of each synchronised backward: a rank that skipped a backward (a
        ``training_step`` that returned None) would else have its gradients reduced with those of another microbatch.
        """
        self.check_open()
        return self.reducer.microbatch

    @microbatch.setter
    def microbatch(self, number: int) -> None:
        self.check_open()
        self.reducer.microbatch = number

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or zeroes) the gradients of all parameters."""
        if self.is_closed:
            super().zero_grad(set_to_none)
            return
        every = range(len(self.params))
        if set_to_none:
            self.grad_buffers.clear(every)
        else:
            self.grad_buffers.zero(every)

    def full_grad(self, param: Parameter) -> Tensor | None:
        """The whole reduced gradient of a parameter: its shape, the gradient dtype, memory of its own; None if it has
        none.

        Collective with reduce-scatter, where ``param.grad`` is a stand-in after a synchronised backward.

        Raises:
            ValueError: if the parameter is not one of the wrapped module's trainable parameters.
        """
        self.check_open()
        index = self.index_by_id.get(id(param))
        if index is None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is not a trainable parameter of the wrapped module"
            )
        grads = self.grad_buffers
        if not grads.is_sharded(index):
            return None if param.grad is None else param.grad.detach().clone()
        grads.adopt_written([index])
        if not grads.has_grad[index]:
            return None
        spec, slot = self.layout.params[index], self.layout.slots[index]
        full = torch.zeros(spec.numel, dtype=self.layout.buffers[slot.buffer].sum_dtype, device=self.device)
        owned, own_grad = self.layout.owned_range(index, self.collectives.rank), self._owned_grad(index)
        in_first_instance = self.collectives.rank < self.layout.num_shards  # others own the same
        if owned is not None and own_grad is not None and in_first_instance:
            full[owned[0] - slot.start : owned[1] - slot.start] = own_grad
        self.collectives.all_reduce(full, 1.0).wait()  # every element is non-zero on one rank at most
        return full.as_strided(spec.shape, spec.stride)

    def grad_norms(self, norm_type: float = 2.0) -> Tensor:
        """The norm of each trainable parameter's gradient: 1-D, fp64, in the order of ``params``, 0 where it has none.

        After a synchronised backward the same bits on every rank, and collective with reduce-scatter.
        """
        self.check_open()
        grads, every = self.grad_buffers, range(len(self.params))
        sharded = [i for i in every if grads.is_sharded(i)]
        grads.adopt_written(sharded)
        norms = torch.zeros(len(self.params), dtype=torch.float64, device=self.device)
        own = norms.clone()
        for index in sharded:
            if grads.has_grad[index] and (grad := self._owned_grad(index)) is not None:
                own[index] = torch.linalg.vector_norm(grad, norm_type)
        if sharded:
            norms = norms_over_owners(own, norm_type, self.shard_collectives)
        for index in set(every).difference(sharded):
            if (local := self.params[index].grad) is not None:
                norms[index] = torch.linalg.vector_norm(local.detach(), norm_type)
        return norms

    def _owned_grad(self, index: int) -> Tensor | None:
        """This rank's part of a reduce-scattered gradient, a view."""
        owned = self.layout.owned_range(index, self.collectives.rank)
        return None if owned is None else self.grad_buffers.reduced(self.layout.slots[index].bucket, *owned)

    def _tell(self, text: str) -> None:
        """What the user should read, once, of rank 0."""
        if self.on_message is not None:
            self.on_message(text)
        else:
            logging.getLogger("megastrategy").info(text)

    def emit(self, kind: EventKind, index: int) -> None:
        """Tells the listener, if there is one."""
        if self._listener is not None:
            self._listener(Event(kind, index))

    def check_open(self) -> None:
        """Raises ClosedError after :meth:`close`, and in a copy."""
        if self.is_closed:
            raise ClosedError(
                "this DistributedDataParallel was closed, or is a copy (deepcopy, pickle): its module is a plain one, "
                "whose gradients nobody would reduce. To train it, wrap the module again, and make a new "
                "DistributedOptimizer"
            )

    def close(self) -> None:
        """Leaves a plain module: parameters own their memory, hooks are gone, ``.grad`` is None. May be called twice.

        Save optimizer state before: a group that this object made for itself ends here.
        """
        if not hasattr(self, "reducer"):
            return  # a copy, which never had an engine
        self.is_closed = True
        try:
            self.finish_param_gather()
        finally:
            self.reducer.close()
            self.grad_buffers.close()
            if self.param_buffers is not None:
                self.param_buffers.restore()
                self.param_buffers = None
            self.collectives.close()
            if self._own_group is not None:
                destroy_instances(self.collectives)
                destroy_group(self._own_group)
                self._own_group = None

    def make_grad_buffers(self) -> GradBuffers:
        """Buffers for the present layout, which take the parameters' gradients in."""
        if not self.config.use_contiguous_buffers:
            return FlattenedGradBuffers(self.layout, self.params, self.device)
        kind = PooledGradBuffers if self.layout.is_pooled else ContiguousGradBuffers
        buffers = kind(self.layout, self.params, self.collectives.rank, self.device)
        buffers.all_reduce_option = self.all_reduce_option
        return buffers

    def _make_planner(self) -> BucketPlanner:
        tuner = None
        if self.config.bucket_size == "auto":
            tuner = BucketSizeTuner(
                self.layout, self.config, self.collectives, self.shard_collectives, self.device, self._tell
            )
        move = functools.partial(relayout, self)
        return BucketPlanner(self.config, self.collectives, self.device, move, tuner)

    def _plan(self) -> BufferLayout:
        """Adds what is trainable and not known yet to ``params``, and lays it out; all ranks agree on it."""
        known = self.index_by_id
        others = [(name, param) for name, param in self.module.named_parameters() if id(param) not in known]
        specs = [param_spec(name, param, self.config) for name, param in others if param.requires_grad]
        joining = [param for _, param in others if param.requires_grad]
        layout = build_layout(specs, self.config, self.collectives.size)
        if joining or not known:
            check_module(self.module, DistributedDataParallel)
            common_device(self.module)
            check_memory_is_own(self.module, joining, self.all_reduce_option, sharded=layout.num_shards > 1)
            check_ranks_agree(layout, self.config, self.collectives, self.device)
        self.params += joining
        self.index_by_id = {id(param): index for index, param in enumerate(self.params)}
        self._watch.look(self.params)
        return layout

    def _check_params(self) -> None:
        """Whether every parameter is still there, and frozen if it was frozen: cheap, before every forward."""
        if self._watch.has_changed():
            check_module(
                self.module, DistributedDataParallel
            )  # which may know more of what came in a parameter's place
            self._watch.look(self.params)
        if any(param.requires_grad for param in self._watch.frozen):
            self.include_trainable()


_NO_JOIN = (
    "{}() belongs to torch DDP, whose ranks may run out of batches one by one. Here every rank takes part in every "
    "reduction, and steps its shard for the others. Give all ranks the same number of batches (DistributedSampler "
    "repeats samples, or with drop_last=True leaves some out), or let a rank that has none left run its backward on "
    "loss * 0.0"
)

_ENGINE = (
    "collectives",
    "_own_group",
    "_listener",
    "params",
    "index_by_id",
    "layout",
    "param_buffers",
    "grad_buffers",
    "param_gather",
    "reducer",
    "shard_holders",
    "on_message",
    "known_findings",
    "_buffers_differ",
    "_watch",
)
"""What a wrapper does not hand to its copies."""
