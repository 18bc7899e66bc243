"""The wrapped module, which behaves like torch DDP to its user; its :class:`Engine` does the work."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from .collectives import Collectives
from .config import DistributedDataParallelConfig
from .data_path import Engine, ReplicaHook, inside_backward, read_count
from .errors import raise_closed
from .events import EventKind, Listener
from .layout import BufferLayout
from .module import GraphSplits, check_equal_weights, check_not_inside_torch_ddp, common_device
from .optimizer import get_rank_state, layout_digest, load_rank_state, weights_digest
from .torch_ddp_by_name import TorchDDPByName
from .torch_ddp_surface import config_with, refuse_comm_hook


class DistributedDataParallel(TorchDDPByName):
    """Data parallelism after Megatron-LM around any module.

    ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` is true.

    Args:
        module: on its device already, the same on every rank; rank 0's parameters and buffers are broadcast. Parameters
            that require no gradients now are left out.
        config: the options; None for the defaults.
        process_group: the data-parallel ranks; None for all. The engine makes a group of its own over the same ranks.
            For a module that ``parallelize_module`` has cut, the group of the mesh's data-parallel dimension.
        expert_mesh: the data-parallel ranks in two named dimensions: ranks with the same experts, ranks with different
            ones. Experts are DTensors, ``Shard`` over the second.
        replicas: other jobs that train the same model, and may end and come back: a :class:`megastrategy.Replicas`,
            whose ``attach`` gets this object. The module begins with the same weights in all of them.
        listener: called with every :class:`~megastrategy.core.events.Event`.
        torch_options: torch DDP's arguments, instead of ``config``: ``find_unused_parameters``,
            ``static_graph``, ``broadcast_buffers``, ``bucket_cap_mb`` and similar ones, and ``device_ids`` (by
            position too) with its device.

    User hooks on a parameter's accumulated gradient (``register_post_accumulate_grad_hook``) run before
    the gradient is sent.

    With the distributed optimizer the parameters' memory moves into a contiguous buffer that this object owns, at the
    end of the first synchronised backward, when their order is known: views of the memory from
    before (``p.data``, ``p.detach()``, an address) are then not the parameter's any more. :meth:`close` moves it back.

    A copy (``deepcopy``, pickle) is closed from the start: it has a copy of the module in memory of its own, and no
    engine. A closed wrapper evaluates its module, and refuses to train it.

    Attributes:
        module: the wrapped module.
        device: of all parameters.
        require_backward_grad_sync: whether the next backward is synchronised; see :meth:`no_sync`.
        require_forward_param_sync: whether module buffers may have changed since they were last broadcast.

    Raises:
        ValueError: if the module cannot be laid out (parameters on several devices, on meta, uninitialised, or DTensors
            of other meshes than one of tensor ranks), or contains a module that torch DDP or ``fully_shard`` wraps.
        LayoutMismatchError: if the ranks' modules or configurations differ.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        process_group: ProcessGroup | None = None,
        *,
        collectives: Collectives | None = None,  # instead of the group's own, for tests and measurements
        listener: Listener | None = None,
        expert_mesh: DeviceMesh | None = None,
        replicas: Any = None,
        # The door's name of the option that selects an all-reduce, for error messages.
        all_reduce_option: str = "DistributedDataParallelConfig(use_distributed_optimizer=False)",
        **torch_options: Any,
    ) -> None:
        super().__init__()
        self.module = module
        if torch_options or not isinstance(config, DistributedDataParallelConfig | None):
            config = config_with(config, torch_options, common_device(dict(module.named_parameters())))
        self.ddp_config = config or DistributedDataParallelConfig()
        self.require_backward_grad_sync = True
        # Attributes of torch DDP that Lightning (strategies/ddp.py), Accelerate (trigger_sync_in_backward)
        # and sentence-transformers' cached losses read, or set.
        self.require_forward_param_sync = True
        self.static_graph = self.ddp_config.static_graph
        self._engine: Engine | None = Engine(
            self,
            self.ddp_config,
            process_group=process_group,
            collectives=collectives,
            listener=listener,
            should_sync=self.should_sync,
            all_reduce_option=all_reduce_option,
            expert_mesh=expert_mesh,
        )
        self.device = self._engine.device
        if replicas is not None:
            replicas.attach(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None}

    def _set_static_graph(self) -> None:
        """Records the declaration, and changes nothing.

        torch needs it where layers are used twice under re-entrant checkpoints. Here the gradients are right without
        it, and the same with it.
        """
        if self.static_graph:
            warnings.warn("static_graph is set already: _set_static_graph() has nothing to do", stacklevel=2)
        self.static_graph = True

    def register_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError, with the alternative."""
        refuse_comm_hook()

    @property
    def engine(self) -> Engine:
        """The engine, with its layout, reducer and gather.

        Raises:
            ClosedError: after :meth:`close`, and in a copy.
        """
        if self._engine is None:
            raise_closed()
        return self._engine

    @property
    def reducer(self) -> Any:  # type: ignore[override] # an attribute of torch DDP
        """The tracker of backwards, where accelerate and torch's pipelining look for torch's reducer."""
        return self.engine.backwards

    @property
    def config(self) -> DistributedDataParallelConfig:
        """The options that it was made with. A subclass may show its module's ``config`` here; ``ddp_config``,
        Megatron-LM's name, always is the engine's."""
        return self.ddp_config

    @property
    def is_closed(self) -> bool:
        """Whether this is only a wrapper without an engine: after :meth:`close`, and in a copy."""
        return self._engine is None

    @property
    def layout(self) -> BufferLayout:
        """The present plan of buffers, buckets and shards."""
        return self.engine.layout

    # torch.compile of this object compiles only the module. A trace of the engine would have five graph breaks and
    # guards on all of its state; and code that runs during a slow collective would be traced in mid-run.
    @_disable_dynamo(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; broadcasts its buffers first where torch DDP would."""
        training = torch.is_grad_enabled()
        engine = self._engine
        if engine is None:
            if self.training and training:
                raise_closed()
            return self._call_module(*args, **kwargs)
        splits = self._begin_forward(engine, training, args, kwargs)
        try:
            outputs = self._call_module(*args, **kwargs)
        except BaseException as error:
            if training:
                engine.backwards.forward_failed(error, syncs=self.require_backward_grad_sync)
            raise
        finally:
            if splits is not None:
                splits.end()
        return self._end_forward(engine, training, outputs)

    # A separate frame for dynamo to compile: it starts at none of torch's own frames, such as Sequential's forward.
    def _call_module(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @_disable_dynamo
    def _begin_forward(
        self, engine: Engine, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GraphSplits | None:
        engine.emit(EventKind.FORWARD_START, int(training))
        if training and not inside_backward():  # inside, a checkpoint around the whole wrapper recomputes it
            check_not_inside_torch_ddp(self)
            engine.backwards.before_forward()
            engine.check_params()
            for group in engine.model_parallel.groups:
                group.before_forward(args, kwargs)
        engine.gather.before_forward()
        if self.require_forward_param_sync and self.ddp_config.broadcast_buffers:
            engine.broadcast_buffers()
        # If nothing could be sent earlier, a single graph is faster.
        is_split = training and engine.sends_under_backward and len(engine.layout.buckets) > 1
        return GraphSplits(engine.layout) if is_split else None

    @_disable_dynamo
    def _end_forward(self, engine: Engine, training: bool, outputs: Any) -> Any:
        sync = self.require_backward_grad_sync
        self.require_forward_param_sync = training and sync
        # A forward that runs the backwards of a batch leaves nothing for a later backward.
        if training and engine.backwards.batch is None:
            engine.backwards.after_forward(outputs, syncs=sync)
        engine.emit(EventKind.FORWARD_END, int(training))
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates the gradients of forward and backward inside without sending them, as torch DDP's ``no_sync``
        does.

        With ``grad_buffer="pooled"`` they are still sent, and accumulate in the shards.
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
            decision: prepared by the forwards; None for a backward inside of a forward.
        """
        return self.require_backward_grad_sync if decision is None else decision

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError: torch DDP continues training with the ranks that have batches left."""
        refuse_join("join")

    def join_hook(self, **_: Any) -> NoReturn:
        """Raises NotImplementedError as :meth:`join` does: ``torch.distributed.algorithms.Join`` calls it."""
        refuse_join("join_hook")

    def watch_backward(self, outputs: Any) -> None:
        """Prepares the next backward, which starts from these tensors, as a forward that returned them would.

        For a loss that no forward of this object returned, such as that of one of the module's own methods: its
        backward is synchronised outside of :meth:`no_sync`. Without this call it is not, as under torch DDP.
        """
        self.engine.backwards.prepare(outputs, syncs=self.require_backward_grad_sync)

    def finish_param_gather(self) -> None:
        """Waits for the parameters that the last step has left in flight, with ``overlap_param_gather=True``.

        A read of a parameter waits by itself; buckets with DTensors, or with other subclasses of Parameter, have
        arrived when the step returns. Call this before code that reads its memory in other ways: a view or
        detached tensor made before the step, torch.func's transforms, torch.jit; and a device stream that waited for
        the loop's before other code read the parameter first.

        Raises:
            CollectiveError: if a gather failed, most often because another rank ended.
        """
        if self._engine is not None:
            self._engine.gather.finish()

    def leave_buffers_apart(self) -> None:
        """Keeps each rank's module buffers of its last forward: the next forward does not broadcast."""
        self.require_forward_param_sync = False

    def include_trainable(self) -> None:
        """Adds parameters that require gradients now and did not before, so that they are synchronised.

        Every training forward begins with it. Collective if there are any, so all ranks have to unfreeze the same
        parameters between the same two forwards.
        """
        self.engine.include_trainable()

    @property
    def microbatch(self) -> int:
        """The number of the current microbatch, if the training loop counts them.

        Compared between ranks at the end of each synchronised backward: if a rank skipped a
        backward (a ``training_step`` that returned None), its gradients would otherwise be reduced
        with those of another microbatch.
        """
        return self.engine.reducer.microbatch

    @microbatch.setter
    def microbatch(self, number: int) -> None:
        self.engine.reducer.microbatch = number

    def count_tokens(self, num_tokens: float | Tensor) -> None:
        """Counts the tokens (or samples) over which the next loss of this model is a sum; 0 for none.

        Gradients are then those of the mean over all tokens of all ranks and of the microbatches accumulated together,
        as under Megatron's ``calculate_per_token_loss``; the loss is not divided by their number. Call it once for
        every loss of a step before its backward, on all ranks. Without gradients (``no_grad``) it does nothing.

        Args:
            num_tokens: a tensor is read, and on a device waited for. A count of the collate function is on the host.

        Raises:
            ValueError: if the number is negative, not finite, or more than one.
            LossTokensError: here if it is called too late for all ranks to know of it; at the end of the synchronised
                backward, on all ranks, if they did not all count every loss, or if the gradients of the previous
                synchronised backward were neither stepped with nor dropped.
        """
        announce_tokens(num_tokens, [self])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or zeroes) the gradients of all parameters."""
        engine = self._engine
        if engine is None:
            super().zero_grad(set_to_none)
            return
        engine.zero_grads(engine.params, set_to_none=set_to_none)

    def full_grad(self, param: Parameter) -> Tensor | None:
        """Returns the full reduced gradient of a parameter: its shape, the gradient dtype, memory of its own; None
        if it has none.

        Collective with reduce-scatter, where ``param.grad`` is a stand-in after a synchronised backward.

        Raises:
            ValueError: if the parameter is not one of the wrapped module's trainable parameters.
        """
        return self.engine.full_grad(param)

    def grad_norms(self, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of each trainable parameter's gradient: 1-D, fp64, in the order of
        ``layout.params``, 0 without one.

        After a synchronised backward the same bits on every rank, and collective with reduce-scatter.
        """
        return self.engine.grad_norms(norm_type)

    def check_replicas(self) -> None:
        """Compares the weights that should be equal on all ranks, for a check every few hundred steps.

        Collective, between steps. Costs a pass over the weights on the host.

        Raises:
            ReplicaMismatchError: on all ranks, with the first parameter that differs.
        """
        self.finish_param_gather()
        engine = self.engine
        engine.collectives.wait_for_device(engine.device, "all-gather")
        check_equal_weights(engine.named_params(), engine.local_parts, engine.model_parallel, engine.collectives)

    def set_replica_hook(self, hook: ReplicaHook) -> None:
        """Calls ``hook`` for each reduced shard, before it is final, as FSDP2's ``set_all_reduce_hook`` does.

        Raises:
            ValueError: after the first backward, and for a pipeline.
        """
        self.engine.reducer.set_replica_hook(hook)

    def rank_state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of weights and optimizers, for the same rank of another replica, and nothing of
        other ranks. Tensors are not copied: until they are sent, no optimizer steps."""
        return get_rank_state(self.engine)

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state that the same rank of another replica has returned. Collective.

        Raises:
            LayoutMismatchError: if it is of another model, before anything is changed.
        """
        load_rank_state(self.engine, state)

    def layout_digest(self) -> str:
        """Returns a digest of this rank's layout and options: replicas with one digest reduce the same shards."""
        return layout_digest(self.engine)

    def weights_digest(self) -> str:
        """Returns a digest of this rank's weights, frozen ones too."""
        return weights_digest(self.engine)

    def check_open(self) -> None:
        """Raises ClosedError after :meth:`close`, and in a copy."""
        _ = self.engine

    def close(self) -> None:
        """Leaves an ordinary module: parameters own their memory, hooks are gone, ``.grad`` is None.
        May be called twice.

        Sends nothing. Its optimizers become torch's own again, with all of their state on every rank, when they are
        used next: all ranks then use a sharded one together. Until then, or until it is deleted, the engine's process
        groups stay.
        """
        engine = self._engine
        self._engine = None
        if engine is not None:
            engine.close()


def announce_tokens(num_tokens: float | Tensor, models: Sequence[DistributedDataParallel], num_losses: int = 1) -> None:
    """Counts the tokens of the next loss of these models, which a framework divides by ``num_losses``; see
    ``count_tokens``."""
    if not torch.is_grad_enabled():  # an evaluation
        return
    for model in models:
        if isinstance(num_tokens, Tensor):
            model.engine.collectives.wait_for_device(num_tokens.device, "a collective before count_tokens")
        num_tokens = read_count(num_tokens)
        model.engine.backwards.count_loss(num_tokens / num_losses)


def forget_announced(models: Sequence[DistributedDataParallel]) -> None:
    """Forgets the tokens of a loss that has not reached these models."""
    for model in models:
        model.engine.reducer.tokens.announced.clear()


def refuse_join(method: str) -> NoReturn:
    """Raises the error of torch's ``Join``, for a wrapped model and its optimizer."""
    raise NotImplementedError(
        f"{method}() belongs to torch DDP, whose ranks may run out of batches one by one: here every rank takes part "
        "in every reduction, and steps its shard for the others.\n"
        "Give all ranks the same number of batches (DistributedSampler repeats samples, or with drop_last=True leaves "
        "some out), or let a rank without a batch run its backward on loss * 0.0"
    )
