"""The user's optimizer, stepped on this rank's shards.

[Note: whose object is it]
The user's own optimizer object does the arithmetic. During ``step`` its groups hold this rank's flat shards; at any
other time they hold the model's Parameters, so schedulers, callbacks and freezing code see what they expect. Its
``state`` is keyed by the shards throughout. :class:`DistributedOptimizer` is the face shown to the framework;
everything it knows is in one :class:`_ShardedStep`, since frameworks copy an optimizer's ``__dict__`` into wrappers
of their own.

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
from .checkpoint import gather_main_params, gather_state_dict, load_full_state_dict, load_main_params, shard_state
from .clip_grads import check_finite, scale_to_norm_, total_grad_norm, unscale_grads_
from .collectives import Collectives
from .distributed_data_parallel import DistributedDataParallel
from .elementwise import probe_state_tensors, why_not_elementwise
from .errors import DirectUseError, OptimizerNotShardableError
from .events import EventKind
from .layout import BufferLayout
from .param_shard import ParamShard


class _ShardedStep:
    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
        self.inner = optimizer
        self.model = model
        self.sharded = self.layout.num_shards > 1
        self.shards: dict[int, ParamShard] = {}
        self._passing_through = False
        self._grad_views: dict[int, Tensor] = {}
        self.num_steps_begun = self.num_steps_done = 0
        self._stepped: dict[int, int] = {}  # by parameter, which of its gradients this optimizer has stepped with
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
                self.inner.state[shard.main] = shard_state(state, self.layout.params[index], shard)

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
            # not what this rank found to step, which a gradient written on one rank alone would change
            model.param_gather.gather({self.layout.slots[i].bucket for i in indices if model.params[i].requires_grad})
            self._stepped.update((index, model.grad_buffers.num_updates[index]) for index in indices)
            model.grad_buffers.use_up(indices)
        self.num_steps_done += 1

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


class DistributedOptimizer(torch.optim.Optimizer):
    """Any torch optimizer over a :class:`~megastrategy.DistributedDataParallel` model, sharded over the ranks.

    Args:
        optimizer: built on ``model.parameters()`` or a part of it, with any groups. The object itself goes on being
            used: its groups, hyper-parameters and schedulers keep working. Must not be stepped directly any more.
        model: the wrapped model.

    With ``use_distributed_optimizer=False`` every rank steps all parameters; 16-bit weights get fp32 main params
    either way. The instance is also an instance of the optimizer's class.

    For fp16 autocast use :class:`~megastrategy.GradScaler`: torch's reads ``.grad``, which a sharded optimizer does not
    show. Zero gradients here or through the wrapped model: after a synchronised backward ``.grad`` is None already, so
    that zeroing the raw module or the inner optimizer cannot be noticed.

    Raises:
        ValueError: if the model is not wrapped, or the optimizer has a parameter that the model has not.
        OptimizerNotShardableError: if the update is not element-wise (found by a numerical probe) and the model's
            configuration shards the optimizer.
    """

    _impl: _ShardedStep

    def __new__(cls, optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> DistributedOptimizer:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise ValueError(
                f"expected a torch.optim.Optimizer that is not distributed yet, got {type(optimizer).__name__}"
            )
        kind = type(cls.__name__, (cls, type(optimizer)), {"__module__": cls.__module__})
        return object.__new__(kind)

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"expected a megastrategy.DistributedDataParallel model, got {type(model).__name__}: wrap the module "
                "first"
            )
        if model.layout.num_shards > 1:
            main_dtype = (
                torch.float64 if any(spec.dtype == torch.float64 for spec in model.layout.params) else torch.float32
            )
            reason = why_not_elementwise(optimizer, model.device, main_dtype)
            if reason is not None:
                raise OptimizerNotShardableError(
                    f"{type(optimizer).__name__} cannot be sharded: {reason}. Set use_distributed_optimizer=False: "
                    "every rank then steps whole parameters, as under torch DDP"
                )
        elif any(spec.has_main_param for spec in model.layout.params) and probe_state_tensors(optimizer) is None:
            raise OptimizerNotShardableError(
                f"{type(optimizer).__name__} cannot step the fp32 main params of 16-bit weights: a trial step "
                "without a closure failed. Keep the weights in fp32 (autocast for the forward), or use another "
                "optimizer"
            )
        state = optimizer.state_dict() if optimizer.state else None
        self._impl = impl = _ShardedStep(optimizer, model)
        if impl.has_shards:
            optimizer.register_step_pre_hook(impl.refuse_direct_use)
            optimizer.register_state_dict_pre_hook(impl.refuse_direct_use)
            optimizer.register_load_state_dict_pre_hook(impl.refuse_direct_use)
        if impl.has_shards and state is not None:
            optimizer.state.clear()
            self.load_state_dict(state)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        return self._impl.inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's optimizer's groups: the model's Parameters and hyper-parameters."""
        return self._impl.inner.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        """Lightning's finetuning callbacks assign the groups they had before a restart."""
        before, self._impl.inner.param_groups = self._impl.inner.param_groups, param_groups
        try:
            self._impl.check_groups()
        except ValueError:
            self._impl.inner.param_groups = before
            raise

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The user's optimizer's state, keyed by this rank's shards."""
        return self._impl.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._impl.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name in ("_impl", "_step_supports_amp_scaling"):
            # the second: unscaling is never left to a fused step, which would make clipping impossible
            raise AttributeError(name)
        return getattr(self._impl.inner, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters, and returns the closure's result. Collective.

        When it returns every rank holds all new weights. With reduce-scatter the step uses the gradients up: a
        second step finds none, and the next backward starts from zero, whether or not ``zero_grad`` is called.
        """
        impl = self._impl
        if not impl.has_shards:
            return impl.step_whole(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with torch.no_grad():
            impl.step()
        return result

    @property
    def num_steps(self) -> tuple[int, int]:
        """How many steps of this object began to change weights, and how many were completed.

        After an exception the ranks' shards and weights belong together if all ranks have the same two numbers, equal.
        """
        return self._impl.num_steps_begun, self._impl.num_steps_done

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or, with ``set_to_none=False``, zeroes) the gradients of this optimizer's parameters."""
        impl = self._impl
        if set_to_none:
            impl.model.grad_buffers.clear(impl.param_indices())
        else:
            impl.model.grad_buffers.zero(impl.param_indices())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` over this optimizer's parameters; the total norm, the same bits on
        every rank. Collective."""
        impl = self._impl
        impl.finish_grads()
        if not impl.sharded:
            params = [param for group in self.param_groups for param in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        grads = impl.owned_grads()
        norm = impl.norm(grads, norm_type)
        if error_if_nonfinite:
            check_finite(norm, norm_type)
        with torch.no_grad():
            scale_to_norm_(grads, norm, max_norm)
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """As ``torch.nn.utils.clip_grad_value_`` over this optimizer's parameters."""
        impl = self._impl
        impl.finish_grads()
        grads = impl.owned_grads()
        if grads:
            torch._foreach_clamp_min_(grads, -clip_value)
            torch._foreach_clamp_max_(grads, clip_value)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of this optimizer's reduced gradients: a scalar, the same bits on every rank. Collective."""
        impl = self._impl
        impl.finish_grads()
        return impl.norm(impl.owned_grads(), norm_type)

    def full_grad(self, param: Parameter) -> Tensor | None:
        """The whole reduced gradient of a parameter, in memory of its own; None if it has none. Collective."""
        return self._impl.model.full_grad(param)

    def unscale_grads_(self, inv_scale: Tensor) -> Tensor:
        """For gradient scalers: multiplies the gradients by ``inv_scale``; (1,) fp32, 1.0 on all ranks if any is not
        finite. Collective."""
        impl = self._impl
        impl.finish_grads()
        return unscale_grads_(impl.owned_grads(), inv_scale, impl.owner_collectives, impl.model.device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the parameters must belong to the wrapped model. Collective if any was not trained before."""
        self._impl.inner.add_param_group(param_group)
        try:
            self._impl.check_groups()
        except ValueError:
            self._impl.inner.param_groups.pop()
            raise
        self._impl.model.include_trainable()
        self._impl.follow_model()

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer would have saved under torch DDP: full-shaped state by parameter index, on the host.
        Collective.

        Rank 0 gets the state; on other ranks ``state`` is empty and the groups are there.
        """
        impl = self._impl
        if not impl.has_shards:
            return impl.inner.state_dict()
        impl.follow_model()
        return gather_state_dict(
            impl.inner, impl.index_by_id, impl.shards, impl.layout, impl.owner_collectives, impl.model.device
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch DDP would have saved it (every rank the whole of it) and keeps this rank's shards."""
        impl = self._impl
        if not impl.has_shards:
            impl.inner.load_state_dict(state_dict)
            return
        impl.follow_model()
        load_full_state_dict(impl.inner, state_dict, impl.index_by_id, impl.shards, impl.layout, impl.groups_of_shards)

    def main_params(self) -> dict[str, Tensor]:
        """The fp32 main params of 16-bit weights by parameter name, whole, on rank 0's host; else empty. Collective."""
        impl = self._impl
        impl.follow_model()
        return gather_main_params(impl.shards, impl.layout, impl.owner_collectives, impl.model.device)

    def load_main_params(self, main_params: dict[str, Tensor]) -> None:
        """Takes over saved main params where they round to the present weights; elsewhere the weights win."""
        self._impl.follow_model()
        load_main_params(main_params, self._impl.shards, self._impl.layout)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self._impl.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self._impl.inner.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._impl.inner!r})"
