"""What a :class:`~megastrategy.DistributedOptimizer` knows and does: the user's optimizer on this rank's shards.

[Note: main params]
A 16-bit weight has an fp32 main param on the rank that owns it: the optimizer updates that and the weight gets its
rounding. Before each step the two are compared element by element; where the weight is not the rounding of the main
param, somebody changed it from outside (``load_state_dict``, averaging, ``p.data = x``), and the main param takes the
weight's value. fp32 and fp64 weights need no main param: the shard is a view of the weights themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .buffers import ContiguousGradBuffers, slice_view
from .checkpoint import shard_state
from .clip_grads import total_grad_norm
from .collectives import Collectives
from .distributed_data_parallel import DistributedDataParallel
from .errors import DirectUseError
from .events import EventKind
from .layout import BufferLayout
from .param_shard import ParamShard


class ShardedStep:
    """The optimizer of one :class:`~megastrategy.DistributedOptimizer`, its model, and this rank's shards between
    them."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
        self.inner = optimizer
        self.model = model
        model.has_optimizer = True
        self.sharded = self.layout.num_shards > 1
        self.shards: dict[int, ParamShard] = {}
        self._passing_through = False
        self._grad_views: dict[int, Tensor] = {}
        self.num_steps_begun = self.num_steps_done = 0
        self._stepped: dict[int, int] = {}  # by parameter, which of its gradients this optimizer has stepped with
        self._reductions: dict[int, int] = {}  # by parameter, how often its gradient was reduced before the last step
        self.check_groups()
        self.follow_model()

    @property
    def layout(self) -> BufferLayout:
        """The model's; it grows when parameters join."""
        return self.model.layout

    @property
    def index_by_id(self) -> dict[int, int]:
        return self.model.index_by_id

    @property
    def owner_collectives(self) -> Collectives | None:
        """The ranks among which elements are divided; None where every rank has all of them."""
        return self.model.collectives if self.sharded else None

    @property
    def has_shards(self) -> bool:
        """Whether stepping goes through tensors other than the model's Parameters."""
        return self.sharded or any(spec.has_main_param for spec in self.layout.params)

    def check_groups(self) -> None:
        """Raises ValueError if the optimizer has a parameter that the model has not."""
        known = {id(param) for param in self.model.module.parameters()}
        for number, group in enumerate(self.inner.param_groups):
            for place, param in enumerate(group["params"]):
                if id(param) not in known:
                    raise ValueError(
                        f"the optimizer's parameter {place} of group {number}, of shape {tuple(param.shape)}, is not "
                        "a parameter of the wrapped model: its gradient would never be reduced. Pass "
                        "model.parameters() of the model that was wrapped"
                    )

    def follow_model(self) -> None:
        """Makes the shards of parameters that have none yet: at the start, and when some were unfrozen or added.

        State that was loaded while a parameter was frozen is cut to its shard.
        """
        if not self.has_shards or self.model.is_closed:
            return
        for param in [param for group in self.inner.param_groups for param in group["params"]]:
            index = self.index_by_id.get(id(param))
            if index is None or index in self.shards:
                continue
            self._add_shard(index, param)
            state = self.inner.state.pop(param, None) if self.inner.state.get(param) else None
            if state and index in self.shards:
                shard = self.shards[index]
                self.inner.state[shard.main] = shard_state(self.inner, state, self.layout.params[index], shard)

    def _add_shard(self, index: int, param: Parameter) -> None:
        spec, slot = self.layout.params[index], self.layout.slots[index]
        buffers = self.model.param_buffers
        if buffers is None:
            main = param.detach().to(torch.float32, copy=True) if spec.has_main_param else param
            self.shards[index] = ParamShard(index, 0, spec.numel, main, None)
            return
        owned = self.layout.owned_range(index, self.model.collectives.rank)
        if owned is None:
            return
        start, end = owned
        weights = slice_view(buffers.flats[slot.buffer], start, (end - start,), (1,), end - start)
        main = weights.float() if spec.has_main_param else weights
        self.shards[index] = ParamShard(index, start - slot.start, end - slot.start, main, weights)
        grads = self.model.grad_buffers
        assert isinstance(grads, ContiguousGradBuffers), "parameters are sharded only with persistent gradient buffers"
        self._grad_views[index] = grads.flats[slot.buffer][start:end]

    def names_by_id(self) -> dict[int, str]:
        """By ``id``, the names of the model's parameters, frozen ones too."""
        return {id(param): name for name, param in self.model.module.named_parameters()}

    # --- gradients ---------------------------------------------------------------------------------------------------

    def param_indices(self) -> list[int]:
        """The layout's indices of this optimizer's parameters."""
        ids = dict.fromkeys(id(param) for group in self.inner.param_groups for param in group["params"])
        return [self.index_by_id[key] for key in ids if key in self.index_by_id]

    def owned_grads(self) -> list[Tensor]:
        """The reduced gradients of this optimizer's parameters that this rank answers for: views, in the gradient
        dtype."""
        if not self.sharded:
            params = [self.model.params[index] for index in self.param_indices()]
            return [param.grad for param in params if param.grad is not None]
        has_grad = self.model.grad_buffers.has_grad
        return [self._grad_views[i] for i in self.param_indices() if has_grad[i] and i in self._grad_views]

    def may_step(self, index: int) -> bool:
        """Whether a sharded parameter has a gradient that this optimizer has not stepped with; others may have."""
        grads = self.model.grad_buffers
        return grads.has_grad[index] and self._stepped.get(index) != grads.num_updates[index]

    def norm(self, grads: list[Tensor], norm_type: float) -> Tensor:
        """The norm over all owners of ``grads``: a scalar in fp32, or fp64 if the model has fp64 gradients."""
        total = total_grad_norm(grads, norm_type, self.owner_collectives, self.model.device)
        in_fp64 = any(spec.grad_dtype == torch.float64 for spec in self.layout.params)
        return total if in_fp64 else total.to(torch.float32)

    def _grad_of(self, shard: ParamShard) -> Tensor | None:
        if not self.sharded:
            grad = self.model.params[shard.param].grad
        else:
            grad = self._grad_views[shard.param] if self.may_step(shard.param) else None
        return None if grad is None else grad.to(shard.main.dtype)

    # --- step --------------------------------------------------------------------------------------------------------

    def stepped_tensor(self, param: Parameter) -> Tensor | None:
        """What the optimizer has in its place: this rank's shard, itself if frozen, None if all of it is elsewhere."""
        index = self.index_by_id.get(id(param))
        if index is None:
            return param
        return self.shards[index].main if index in self.shards else None

    @contextlib.contextmanager
    def groups_of_shards(self) -> Iterator[None]:
        """The optimizer's groups hold this rank's shards while this is open; a group may be empty, none is missing."""
        whole = [group["params"] for group in self.inner.param_groups]
        for group, params in zip(self.inner.param_groups, whole, strict=True):
            group["params"] = [tensor for param in params if (tensor := self.stepped_tensor(param)) is not None]
        self._passing_through = True
        try:
            yield
        finally:
            self._passing_through = False
            # asked for again: load_state_dict makes new group dictionaries
            for group, params in zip(self.inner.param_groups, whole, strict=True):
                group["params"] = params

    def finish_grads(self) -> None:
        """Before gradients are used: reduces what is not yet, and takes in what the user wrote into ``.grad`` since.

        Without shards ``.grad`` is the truth, local or not, as under torch DDP.
        """
        self.model.check_open()
        self.follow_model()
        if self.sharded:
            self.model.reducer.finish_grad_sync()
            self.model.grad_buffers.adopt_written(self.param_indices())

    def step_whole(self, closure: Callable[[], Any] | None) -> Any:
        """Without shards the user's optimizer steps the Parameters themselves, and may call the closure as it likes."""
        if closure is None:
            self._begin_step()
            result = self.inner.step()
        else:

            def evaluate() -> Any:
                loss = closure()
                self._begin_step()
                return loss

            result = self.inner.step(evaluate)
        self.model.emit(EventKind.STEP_END, 0)
        self.num_steps_done += 1
        return result

    def _begin_step(self) -> None:
        self.num_steps_begun = self.num_steps_done + 1
        self.model.emit(EventKind.STEP_START, 0)

    def step(self) -> None:
        model = self.model
        self.finish_grads()
        indices = self.param_indices()
        if model.param_buffers is not None:
            model.param_buffers.recapture()
        own = [self.shards[index] for index in indices if index in self.shards]
        self._begin_step()
        for shard in own:
            self._take_outside_changes(shard)
            shard.main.grad = self._grad_of(shard)
        try:
            with self.groups_of_shards():
                self.inner.step()
            for shard in own:
                weights = self._weights_of(shard)
                if weights is not None and shard.main.grad is not None:
                    weights.copy_(shard.main)
        finally:
            for shard in own:
                if shard.main is not model.params[shard.param]:
                    shard.main.grad = None
        model.emit(EventKind.STEP_END, 0)
        if self.sharded:
            model.param_gather.gather({self.layout.slots[index].bucket for index in indices if self._may_change(index)})
            self._stepped.update((index, model.grad_buffers.num_updates[index]) for index in indices)
            model.grad_buffers.use_up(indices)
        self.num_steps_done += 1

    def _may_change(self, index: int) -> bool:
        """Whether some rank may have stepped the parameter: not whether this rank did, which a gradient written on one
        rank alone would change. What was frozen after its gradient was reduced is stepped all the same."""
        reductions = self.model.reducer.num_reductions[index]
        since, self._reductions[index] = self._reductions.get(index, 0), reductions
        return self.model.params[index].requires_grad or reductions != since

    def _weights_of(self, shard: ParamShard) -> Tensor | None:
        """The 16-bit weights that get the rounding of the shard's main param; None if there is no main param."""
        if not self.layout.params[shard.param].has_main_param:
            return None
        return shard.weights if shard.weights is not None else self.model.params[shard.param].detach()

    def _take_outside_changes(self, shard: ParamShard) -> None:
        weights = self._weights_of(shard)
        if weights is not None:
            changed = shard.main.to(weights.dtype) != weights
            torch.where(changed, weights.float(), shard.main, out=shard.main)

    def refuse_direct_use(self, *_: Any) -> None:
        """Hook on the user's object: between steps it does not hold what it steps, and its state is of shards."""
        if not self._passing_through:
            raise DirectUseError(
                "this optimizer is sharded: call step(), state_dict() and load_state_dict() of the "
                "DistributedOptimizer around it, on all ranks, instead of those of the optimizer that was passed to "
                "it"
            )
