"""The user's optimizer, stepped on this rank's runs: the object that frameworks and schedulers get.

All of its own state is in one :class:`~.sharded_optimizer.ShardedOptimizer`, since frameworks copy an optimizer's
``__dict__`` into wrappers of their own.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.nn import Parameter

from .checkpoint import (
    OpenDirectory,
    as_on_rank_zero,
    completed_state,
    parts_of_main_params,
    parts_of_state,
    parts_to_write,
    place_at,
    read_parts,
    require_everybody,
    whole_main_params,
    whole_state,
    with_device,
    without_device,
)
from .collectives import CALL_ON_EVERY_RANK
from .data_path import (
    ReducedGrad,
    check_finite,
    norms_over_owners,
    scale_to_norm_,
    total_grad_norm,
    unscale_grads_,
)
from .distributed_data_parallel import DistributedDataParallel, refuse_join
from .errors import DirectUseError, OptimizerNotShardableError
from .events import profiler_range
from .judge import Sharding
from .optimizer import (
    GuardedState,
    ShardedOptimizer,
    check_optimizer,
    forwarding_members,
    full_state,
    has_others,
    join_norm,
    load_with_hooks,
    save_with_hooks,
    split_closure,
    take_back,
    unguarded_state,
)
from .states import MAIN_PARAMS, STATE


class DistributedOptimizer(torch.optim.Optimizer):
    """Any torch optimizer over a :class:`~megastrategy.DistributedDataParallel` model, sharded over the ranks.

    Args:
        optimizer: built on ``model.parameters()`` or a part of it, with any groups. The object itself goes on being
            used: its groups, hyper-parameters and schedulers keep working. Must not be stepped directly any more.
            Parameters that are not in the model are stepped as under torch DDP, each rank with its own gradient.
        model: the wrapped model.
        sharding: how the ranks divide the parameters of a group. An entry ``sharding`` of a parameter group overrides
            it.

            - "auto": found by a test of the optimizer on small tensors.
            - "flat": each rank steps a piece of every parameter, as one dimension; right for an element-wise update.
            - "whole": each parameter is stepped by one rank, in its shape; right for an update that looks at no other
              parameter.
            - "replicated": every rank steps all of them, with all of their state, as under torch DDP; right for an
              update that looks at other parameters of replicated groups.

    Raises:
        ValueError: if ``sharding`` is another word, the model is not wrapped or has none of the optimizer's parameters,
            or another wrapped model has some of them.
        OptimizerNotShardableError: if ``sharding`` is "auto", the model's configuration shards the optimizer, and the
            update of a parameter depends on other parameters.
    """

    _impl: ShardedOptimizer

    def __new__(
        cls, optimizer: torch.optim.Optimizer, model: DistributedDataParallel, *, sharding: Sharding = "auto"
    ) -> DistributedOptimizer:
        optimizer = _of_closed(optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise ValueError(
                f"expected a torch.optim.Optimizer that is not distributed yet, got {type(optimizer).__name__}"
            )
        if not issubclass(type(optimizer), torch.optim.Optimizer):  # isinstance() believes its __class__
            raise ValueError(
                f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}, which says it is one and is not "
                "derived from it: derive it from torch.optim.Optimizer, or pass the optimizer that is inside of it"
            )
        members = forwarding_members(type(optimizer), cls)
        kind = type(cls.__name__, (cls, type(optimizer)), {"__module__": cls.__module__, **members})
        return object.__new__(kind)

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel, *, sharding: Sharding = "auto"
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"expected a megastrategy.DistributedDataParallel model, got {type(model).__name__}: wrap the module "
                "first"
            )
        self._connect(_of_closed(optimizer), model, sharding)

    def connect(self, model: DistributedDataParallel) -> None:
        """Shards the user's optimizer over another wrapper of its parameters, after the first was closed or collected.

        The state stays: all ranks gather it. Collective.

        Raises:
            ValueError: if the first wrapper is in use.
        """
        self._connect(self.optimizer, model, self._sharding)

    def _connect(self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel, sharding: Sharding) -> None:
        engine = model.engine
        take_back(optimizer)
        classes = check_optimizer(optimizer, engine, sharding)
        self._impl = impl = ShardedOptimizer(optimizer, engine, classes)
        self._sharding = sharding
        self._loads_by_itself = False
        self._number = 0
        rank_check = engine.collectives.rank_check
        if impl.is_sharded and rank_check is not None:
            rank_check.num_optimizers += 1
            self._number = rank_check.num_optimizers
        if impl.has_runs:
            impl.hooks = [
                optimizer.register_step_pre_hook(impl.refuse_direct_use),
                optimizer.register_state_dict_pre_hook(impl.refuse_direct_use),
                optimizer.register_load_state_dict_pre_hook(impl.refuse_direct_use),
            ]
            optimizer.__getstate__ = _refuse_copy  # type: ignore[method-assign]

    # --- the user's object --------------------------------------------------------------------------------------------

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
        before = self._impl.inner.param_groups
        self._impl.inner.param_groups = param_groups
        try:
            self._impl.extra_params.find()
        except ValueError:
            self._impl.inner.param_groups = before
            raise

    @property
    def state(self) -> Any:
        """The user's optimizer's state. Where it is keyed by runs, a look-up by one of the model's Parameters raises
        :class:`~.errors.DirectUseError`."""
        impl = self._impl
        return GuardedState(impl) if impl.has_runs and not impl.is_given_back else impl.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """Loops that start anew assign an empty one."""
        self._impl.inner.state = unguarded_state(value, self._impl)
        self._impl.forget_pending_state()

    @property
    def defaults(self) -> dict[str, Any]:
        return self._impl.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._impl.inner.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name in ("_impl", "_step_supports_amp_scaling"):
            # The second: unscaling is never left to a fused step, which would make clipping impossible.
            raise AttributeError(name)
        return getattr(self._impl.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the user's optimizer, or a new option, on that object, where its ``step`` reads it."""
        impl: ShardedOptimizer | None = self.__dict__.get("_impl")
        is_option = isinstance(value, bool | int | float | str) and not name.startswith("_")
        if impl is not None and (is_option or name in impl.inner.__dict__) and not hasattr(type(self), name):
            setattr(impl.inner, name, value)
        else:
            super().__setattr__(name, value)

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the parameters, and returns the closure's result. Collective.

        Accepts the arguments of the user's ``step``, like a closure, and forwards them. With shards or main params a
        closure is called once, before the step.

        Raises:
            OptimizerNotShardableError: if shards cannot be stepped with these arguments, or with an option that was set
                after the optimizer was wrapped. Nothing is changed then.
        """
        plain = self._given_back()
        if plain is not None:
            for grad in (param.grad for group in plain.param_groups for param in group["params"]):
                if isinstance(grad, ReducedGrad):  # weights may change before a step meets it: AdamW's decay
                    raise grad.error("step() of an optimizer whose model was closed, or wrapped again since,")
            return plain.step(*args, **kwargs)
        impl = self._impl
        closure, arguments = split_closure(args, kwargs)
        reducer = impl.engine.reducer
        if not impl.has_runs and reducer.replicas is None:
            return impl.step_params(arguments, closure)
        if impl.is_sharded and has_others(arguments):
            raise OptimizerNotShardableError(
                f"step() of a sharded {type(impl.inner).__name__} accepts a closure and no other arguments. Leave them "
                f"out, or pass {impl.engine.all_reduce_option}: every rank then steps whole parameters, as under torch "
                "DDP"
            )
        result = None
        # Before the gradients are reduced, as torch's optimizers call it before they read any.
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if reducer.drops_step:
            return result
        if not impl.has_runs:
            impl.step_params(arguments)
            return result
        impl.check_options()
        with torch.no_grad(), profiler_range("step"):
            impl.step(arguments)
        return result

    def _given_back(self) -> torch.optim.Optimizer | None:
        """Returns the user's optimizer, a plain one again, if the model was closed; None while it is open."""
        impl = self._impl
        if not impl.engine.is_closed:
            return None
        if not impl.is_given_back:
            impl.give_back()
        return impl.inner

    @property
    def is_closed(self) -> bool:
        """Whether the model was closed."""
        return self._impl.engine.is_closed

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has only a part of the state."""
        return self._impl.needs_ranks or bool(self._impl.engine.model_parallel.collectives)

    def is_cut(self, param: Parameter) -> bool:
        """Whether each rank steps a part of the parameter; not if every rank, or its owner, steps all."""
        impl = self._impl
        impl.model_params()
        index = impl.engine.index_by_id.get(id(param))
        return impl.is_sharded and index is not None and impl.is_flat(index)

    def require_all_ranks(self, what: str, remedy: str = CALL_ON_EVERY_RANK) -> None:
        """Returns when all ranks are about to do ``what``; at once if it is not sharded.

        Raises:
            NotOnAllRanksError: if they are not, within bounded time.
        """
        if self.is_sharded:
            require_everybody(self._impl, what, remedy)

    @property
    def num_steps(self) -> tuple[int, int]:
        """The numbers of steps that began to change weights, and of completed ones.

        A step whose weights did not arrive was not completed; with ``overlap_param_gather=True`` that is known only
        after ``step`` has returned. After an exception shards and weights of all ranks fit together if the two numbers
        are equal, and the same on all ranks.
        """
        impl = self._impl
        begun = impl.num_steps_begun
        if begun and impl.engine.gather.missing:
            return begun, min(impl.num_steps_done, begun - 1)
        return begun, impl.num_steps_done

    # --- gradients ----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or, with ``set_to_none=False``, zeroes) the gradients of this optimizer's parameters."""
        plain = self._given_back()
        if plain is not None:
            plain.zero_grad(set_to_none)
            return
        impl = self._impl
        impl.engine.zero_grads(impl.model_params(), set_to_none=set_to_none)
        impl.extra_params.zero(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` over this optimizer's parameters. Collective.

        Returns the total norm, the same bits on every rank.
        """
        impl = self._impl
        engine = impl.engine
        is_plain = self._given_back() is not None
        if not is_plain:
            impl.finish_grads()
        model = engine.model_parallel
        if is_plain or not (impl.is_sharded or engine.local_parts.has_parts or model.collectives):
            return torch.nn.utils.clip_grad_norm_(impl.params(), max_norm, norm_type, error_if_nonfinite)
        grads = impl.reduced_grads()
        norm = self._norm_of(impl.reduced_grads(counted=True) if model.groups else grads, norm_type)
        if error_if_nonfinite:
            engine.collectives.wait_for_device(engine.device, "all-gather")
            check_finite(norm, norm_type)
        with torch.no_grad():
            scale_to_norm_([*grads, *impl.extra_params.grads()], norm, max_norm)
            engine.zero_padding()
        return norm

    def _norm_of(self, grads: list[Tensor], norm_type: float) -> Tensor:
        impl = self._impl
        engine = impl.engine
        owners = engine.shard_collectives if impl.is_sharded else None
        norm = self._over_model(total_grad_norm(grads, norm_type, owners, engine.device), norm_type)
        if impl.extra_params.params:
            # One number on all ranks among which parameters are divided.
            groups = [*([engine.collectives] if impl.is_sharded else []), *engine.model_parallel.collectives]
            norm = join_norm(norm, impl.extra_params.grads(), norm_type, groups, engine.device)
        return self._in_norm_dtype(norm)

    def _over_model(self, norm: Tensor, norm_type: float) -> Tensor:
        for ranks in self._impl.engine.model_parallel.collectives:
            norm = norms_over_owners(norm, norm_type, ranks)
        return norm

    def _in_norm_dtype(self, norm: Tensor) -> Tensor:
        in_fp64 = self._impl.engine.layout.norm_dtype == torch.float64
        return norm if in_fp64 else norm.to(torch.float32)

    def clip_grad_value_(self, clip_value: float) -> None:
        """As ``torch.nn.utils.clip_grad_value_`` over this optimizer's parameters."""
        impl = self._impl
        if self._given_back() is not None:
            torch.nn.utils.clip_grad_value_(impl.params(), clip_value)
            return
        impl.finish_grads()
        grads = [*impl.reduced_grads(), *impl.extra_params.grads()]
        if grads:
            torch._foreach_clamp_min_(grads, -clip_value)
            torch._foreach_clamp_max_(grads, clip_value)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of this optimizer's reduced gradients: a scalar, the same bits on every rank. Collective."""
        self._impl.finish_grads()
        return self._norm_of(self._impl.reduced_grads(counted=True), norm_type)

    def full_grad(self, param: Parameter) -> Tensor | None:
        """Returns the full reduced gradient of a parameter, in memory of its own; None if it has none. Collective."""
        return self._impl.engine.full_grad(param)

    def unscale_grads_(self, inv_scale: Tensor) -> Tensor:
        """Multiplies the gradients by ``inv_scale``, for gradient scalers. Collective.

        Returns a (1,) fp32 tensor: 1.0 on all ranks if any gradient is not finite, otherwise 0.0.
        """
        impl = self._impl
        impl.finish_grads()
        engine = impl.engine
        # An extra parameter's gradient is not reduced, and may be infinite on only one rank.
        agreeing = engine.shard_collectives if impl.is_sharded else None
        if impl.extra_params.params:
            agreeing = engine.collectives
        grads = [*impl.reduced_grads(), *impl.extra_params.grads()]
        found_inf = unscale_grads_(grads, inv_scale, agreeing, engine.device)
        for ranks in engine.model_parallel.collectives:
            ranks.all_reduce_max(found_inf).wait()
        return found_inf

    def wait_for_found_inf(self) -> None:
        """For gradient scalers: comes before they read on the host what :meth:`unscale_grads_` has found."""
        engine = self._impl.engine
        engine.collectives.wait_for_device(engine.device, "all-reduce")

    # --- groups and state ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Collective if any parameter of the wrapped model was not trained before.

        Raises:
            OptimizerNotShardableError: if shards cannot be stepped with this group's options; it is not added then.
        """
        plain = self._given_back()
        if plain is not None:
            plain.add_param_group(param_group)
            return
        self._impl.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Gathers the state that torch DDP would have saved: full-shaped, by parameter index, on the host.

        Rank 0 gets the state; on other ranks ``state`` has only parameters that every rank steps. All ranks call this
        together.

        Raises:
            NotOnAllRanksError: if it is sharded and not all ranks call it.
        """
        impl = self._impl
        if impl.is_given_back:
            return impl.inner.state_dict()
        if not impl.has_runs:  # the user's optimizer calls its hooks itself
            return whole_state(impl, impl.inner.state_dict)
        with impl.calls_allowed():
            return with_device(
                save_with_hooks(
                    impl.inner, self, lambda: whole_state(impl, lambda: self._gather(STATE, full_state.full_state))
                )
            )

    def _gather(self, what: str, gather: Callable[[ShardedOptimizer], Any]) -> Any:
        impl = self._impl
        if impl.is_sharded:
            # By number: one rank's call for the first of two optimizers must not meet another's for the second.
            which = f" (number {self._number})" if self._number > 1 else ""
            impl.engine.collectives.require_all_ranks(f"{what} of a sharded optimizer{which}")
        return gather(impl)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch DDP would have saved it and keeps this rank's shards. Collective.

        Every rank passes the full state, or the result of :meth:`state_dict` on that rank, or a copy of it: a rank
        whose state has no entries of the model's parameters gets rank 0's.

        Raises:
            CheckpointError: if groups or shapes do not fit; on all ranks, if one has other entries.
        """
        impl = self._impl
        plain = self._given_back()
        if plain is not None:
            plain.load_state_dict(state_dict)
            return
        state_dict = without_device(state_dict)
        is_complete = "state" in state_dict  # otherwise a hook converts it from another format
        if is_complete:
            state_dict = self._completed(state_dict)
        if not impl.has_runs:
            impl.inner.load_state_dict(parts_of_state(impl, state_dict))
            return

        def load(saved: dict[str, Any]) -> None:
            saved = saved if is_complete else self._completed(saved)
            full_state.load_full_state(impl, parts_of_state(impl, saved))

        with impl.calls_allowed():
            load_with_hooks(impl.inner, self, state_dict, load)

    def _completed(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns ``state_dict`` with rank 0's entries of the model's parameters. Collective if it is sharded."""
        if not self.is_sharded or self._loads_by_itself:
            return state_dict
        return completed_state(self._impl, state_dict)

    @contextlib.contextmanager
    def every_rank_has_state(self) -> Iterator[None]:
        """Makes loads send nothing while this is open, since each rank has read the full state from a file."""
        self._loads_by_itself = True
        try:
            yield
        finally:
            self._loads_by_itself = False

    def main_params(self) -> dict[str, Tensor]:
        """Gathers the full fp32 main params of 16-bit weights, by parameter name, in rank 0's host memory.

        Empty on other ranks. All ranks call this together, as :meth:`state_dict`.
        """
        if not self._has_main_params():
            return {}
        impl = self._impl
        is_plain = self._given_back() is not None

        def gather() -> dict[str, Tensor] | None:
            return dict(impl.last_main_params) if is_plain else self._gather(MAIN_PARAMS, full_state.full_main_params)

        return whole_main_params(impl, gather)

    def _has_main_params(self) -> bool:
        """Whether some rank may have main params: a pipeline's stage does not know about the others'."""
        engine = self._impl.engine
        return bool(engine.model_parallel.states) or any(spec.has_main_param for spec in engine.layout.params)

    def load_main_params(self, main_params: dict[str, Tensor]) -> None:
        """Loads saved main params where they round to the present weights; elsewhere the weights are kept.

        Collective, as :meth:`load_state_dict`; a rank that passes none gets rank 0's.
        """
        impl = self._impl
        exchanges = self.is_sharded and not self._loads_by_itself
        if exchanges and not self.is_closed and self._has_main_params():
            main_params = dict(as_on_rank_zero(impl, main_params, MAIN_PARAMS))
        parts = parts_of_main_params(impl, main_params)
        if self._given_back() is not None:
            impl.last_main_params |= parts
        else:
            full_state.load_main_params(impl, parts)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of the state by parameter name.

        For ``torch.distributed.checkpoint.save`` or ``async_save``. The keys are ``state``, ``param_groups`` and, for
        16-bit weights, ``main_params``.
        """
        return parts_to_write(self._impl)

    def load_sharded(self, path: Any, key: str = "optimizer") -> None:
        """Reads a state with :meth:`read_sharded`, and loads it."""
        self.read_sharded(path, key)()

    def read_sharded(self, path: Any, key: str = "optimizer") -> Callable[[], None]:
        """Reads a state of :meth:`sharded_state_dict`, saved under ``key``, on any number of ranks or under FSDP.

        Each rank reads its part; ``path`` may be a URL, for fsspec. Returns a function that loads it, to be called
        after the weights are loaded: where a saved main param does not round to the weight, the weight is kept.

        Raises:
            CheckpointError: if it cannot be read, or is of another model.
        """
        directory = path if isinstance(path, OpenDirectory) else OpenDirectory(place_at(path))
        return read_parts(self._impl, directory, key)

    # --- copies -------------------------------------------------------------------------------------------------------

    def __copy__(self) -> torch.optim.Optimizer:
        """Returns a copy of the user's class, with Parameters in its groups and no state where that is sharded."""
        return copy.copy(self._impl.inner)

    def __setstate__(self, value: dict[str, Any]) -> NoReturn:
        """Raises DirectUseError: torch's would set attributes of this object, which its step does not read."""
        raise DirectUseError(
            f"__setstate__() of {type(self).__name__}: call load_state_dict() on all ranks, or assign "
            "optimizer.state = collections.defaultdict(dict) to forget the state"
        )

    def _patch_step_function(self) -> None:
        self._impl.inner._patch_step_function()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """For deep copies and pickles, as :meth:`__copy__`."""
        return _same, (self._impl.inner,)

    def join_hook(self, **_: Any) -> NoReturn:
        """Refused as the model's is: ``torch.distributed.algorithms.Join`` asks for it."""
        refuse_join("join_hook")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._impl.inner!r})"  # Lightning derives a class of its own


def _of_closed(optimizer: Any) -> Any:
    """Returns the user's optimizer of a DistributedOptimizer whose model was closed; any other object as it is."""
    is_closed = isinstance(optimizer, DistributedOptimizer) and optimizer.is_closed
    return optimizer.optimizer if is_closed else optimizer


def _same(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Unpickles a DistributedOptimizer as the copy of the user's optimizer, which schedulers in the same copy share."""
    return optimizer


def _refuse_copy() -> NoReturn:
    """Raises, as ``__getstate__`` of an optimizer that has shards or main params: copies and pickles call it."""
    raise DirectUseError(
        "an optimizer that steps shards or main params cannot be copied (copy, deepcopy, pickle), alone or with a "
        "scheduler, a callback or a Trainer that refers to it: copy its state_dict(), asked for on all ranks, and load "
        "it into an optimizer that is built on the copied model's parameters"
    )
