"""The user's optimizer, stepped on this rank's shards.

[Note: whose object is it]
The user's own optimizer object does the arithmetic. During ``step`` its groups contain this rank's flat shards and the
whole parameters that it owns; at any other time they contain the model's Parameters, so schedulers, callbacks and
freezing code see what they expect. Its ``state`` is always keyed by the stepped tensors. :class:`DistributedOptimizer`
is the face shown to the framework. All of its own state is in one :class:`~.sharded_optimizer.ShardedOptimizer`, since
frameworks copy an optimizer's ``__dict__`` into wrappers of their own. After the model was closed the user's optimizer
is a plain one again (plain_optimizer's [Note: what close() does to an optimizer]), and the face calls it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.nn import Parameter

from .buffers import ReducedGrad
from .checkpoint import (
    Directory,
    OpenDirectory,
    as_on_rank_zero,
    completed_state,
    has_main_params,
    load_full_state,
    open_directory,
    parts_of_main_params,
    parts_of_state,
    read_state,
    require_everybody,
    state_to_write,
    whole_main_params,
    whole_state,
    with_device,
    without_device,
)
from .collectives import CALL_ON_EVERY_RANK
from .distributed_data_parallel import DistributedDataParallel, refuse_join
from .engine import full_grad
from .errors import DirectUseError, OptimizerNotShardableError
from .events import profiler_range
from .optimizer import (
    GuardedState,
    ShardedOptimizer,
    StepArguments,
    check_optimizer,
    forwarding_members,
    gather_from,
    load_with_hooks,
    norm_of_grads,
    not_shardable,
    owned_grads,
    save_with_hooks,
    take_back,
    unguarded_state,
)
from .shards import MAIN_PARAMS, STATE, Gather, to_host
from .sync import check_finite, scale_to_norm_, unscale_grads_


class DistributedOptimizer(torch.optim.Optimizer):
    """Any torch optimizer over a :class:`~megastrategy.DistributedDataParallel` model, sharded over the ranks.

    Args:
        optimizer: built on ``model.parameters()`` or a part of it, with any groups. The object itself goes on being
            used: its groups, hyper-parameters and schedulers keep working. Must not be stepped directly any more.
            Parameters that are not in the model are stepped as under torch DDP, each rank with its own gradient.
        model: the wrapped model.

    A group whose update is element-wise is stepped as flat shards. In a group that needs whole parameters (Muon, LAMB)
    each parameter is stepped by the rank that owns it.

    With ``use_distributed_optimizer=False`` every rank steps all parameters; 16-bit weights get fp32 main params
    either way. The instance is also an instance of the optimizer's class.

    For fp16 autocast use :class:`~megastrategy.GradScaler`: torch's reads ``.grad``, which a sharded optimizer does not
    show.

    Raises:
        ValueError: if the model is not wrapped, or has none of the optimizer's parameters, or another wrapped model has
            some of them.
        OptimizerNotShardableError: if the update of a parameter depends on other parameters (found by a numerical
            probe) and the model's configuration shards the optimizer.
    """

    _impl: ShardedOptimizer

    def __new__(cls, optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> DistributedOptimizer:
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

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"expected a megastrategy.DistributedDataParallel model, got {type(model).__name__}: wrap the module "
                "first"
            )
        self._connect(_of_closed(optimizer), model)

    def connect(self, model: DistributedDataParallel) -> None:
        """Shards the user's optimizer over another wrapper of its parameters, after the first was closed or collected.

        The state stays: all ranks gather it. Objects that refer to this one, such as schedulers, go on with it.
        Collective.

        Raises:
            ValueError: if the first wrapper is in use.
        """
        self._connect(self.optimizer, model)

    def _connect(self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
        engine = model.engine
        take_back(optimizer)
        findings = check_optimizer(optimizer, engine)
        self._impl = impl = ShardedOptimizer(optimizer, engine, findings)
        self._loads_by_itself = False
        self._number = 0
        shard_set = impl.shard_set
        if shard_set.owner_collectives is not None and (rank_check := engine.collectives.rank_check) is not None:
            rank_check.start_responder()
            self._number = rank_check.num_optimizers
        if shard_set.has_shards:
            shard_set.hooks = [
                optimizer.register_step_pre_hook(shard_set.refuse_direct_use),
                optimizer.register_state_dict_pre_hook(shard_set.refuse_direct_use),
                optimizer.register_load_state_dict_pre_hook(shard_set.refuse_direct_use),
            ]
            optimizer.__getstate__ = _refuse_copy  # type: ignore[method-assign]

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
            self._impl.shard_set.extra_params.find()
        except ValueError:
            self._impl.inner.param_groups = before
            raise

    @property
    def state(self) -> Any:
        """The user's optimizer's state. Where it is keyed by this rank's shards, a look-up by one of the model's
        Parameters raises :class:`~.errors.DirectUseError`; see guarded_state's
        [Note: why a look-up by a Parameter raises]."""
        shard_set = self._impl.shard_set
        shard_set.states.split()
        return GuardedState(shard_set) if shard_set.has_shards else shard_set.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        """Loops that start anew assign an empty one."""
        shard_set = self._impl.shard_set
        state = unguarded_state(state, shard_set)
        shard_set.states.split(replace=True)
        shard_set.inner.state = state
        shard_set.states.keep_loaded(shard_set.shards.values())

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

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the parameters, and returns the closure's result. Collective.

        Accepts a closure; where every rank steps all parameters, also other arguments of the user's ``step``. With
        shards, main params or replicas a closure is called once, before the step.

        With replicas it does nothing if the others have stepped without this one, whose weights are theirs then.

        When it returns every rank has all new weights. Gradients stay until they are zeroed, as torch's do.

        Raises:
            OptimizerNotShardableError: for other arguments than a closure, if shards are stepped, and for an option
                with which they cannot be, set after the optimizer was wrapped. Nothing is changed then.
        """
        plain = self._given_back()
        if plain is not None:
            for grad in (param.grad for group in plain.param_groups for param in group["params"]):
                if isinstance(grad, ReducedGrad):  # weights may change before a step meets it: AdamW's decay
                    raise grad.error("step() of an optimizer whose model was closed, or wrapped again since,")
            return plain.step(*args, **kwargs)
        impl = self._impl
        arguments = StepArguments(args, kwargs)
        has_shards = impl.shard_set.has_shards
        if not has_shards and not impl.has_replicas:
            return impl.step_params(arguments)
        closure = arguments.closure
        others = arguments.without_closure()
        if others and not impl.accepts_arguments:
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
        if impl.has_replicas and impl.skips_step():
            return result
        if not has_shards:
            impl.step_params(others)
            return result
        reason = impl.try_options()
        if reason is not None:
            raise not_shardable(impl.inner, impl.engine, reason)
        with torch.no_grad(), profiler_range("step"):
            impl.step(others)
        return result

    def _given_back(self) -> torch.optim.Optimizer | None:
        """Returns the user's optimizer, a plain one again, if the model was closed; None while it is open."""
        impl = self._impl
        if not impl.engine.is_closed:
            return None
        impl.shard_set.give_back()
        return impl.inner

    @property
    def is_closed(self) -> bool:
        """True if its model was closed, so that calls go to the user's optimizer."""
        return self._impl.engine.is_closed

    @property
    def is_sharded(self) -> bool:
        """True if this rank has only a part of the state."""
        return self._impl.shard_set.sharded or bool(self._impl.engine.model_parallel.collectives)

    @property
    def is_of_stage(self) -> bool:
        """True if optimizers on other ranks have other parameters of the model."""
        return bool(self._impl.engine.model_parallel.states)

    def is_cut(self, param: Parameter) -> bool:
        """Returns True if each rank steps a part of the parameter; False if every rank, or its owner, steps all."""
        shard_set = self._impl.shard_set
        index = shard_set.engine.index_by_id.get(id(param))
        return index is not None and shard_set.is_cut(index)

    def require_all_ranks(self, what: str, remedy: str = CALL_ON_EVERY_RANK) -> None:
        """Returns when all ranks are about to do ``what``, as a framework's saves need; at once if it is not sharded.

        ``remedy`` is the last sentence of the message.

        Raises:
            NotOnAllRanksError: if they are not, within bounded time.
        """
        if self.is_sharded:
            require_everybody(self._impl.shard_set, what, remedy)

    @property
    def num_steps(self) -> tuple[int, int]:
        """The numbers of steps that began to change weights, and of completed ones.

        A step whose weights did not arrive was not completed; with ``overlap_param_gather=True`` that is known
        only after ``step`` has returned.

        After an exception shards and weights of all ranks fit together if the two numbers are equal, and the same on
        all ranks.
        """
        impl = self._impl
        begun = impl.shard_set.num_steps_begun
        done = impl.num_steps_done
        lacks_weights = impl.shard_set.sharded and bool(impl.engine.param_gather.missing)
        return begun, min(done, begun - 1) if begun and lacks_weights else done

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or, with ``set_to_none=False``, zeroes) the gradients of this optimizer's parameters."""
        plain = self._given_back()
        if plain is not None:
            plain.zero_grad(set_to_none)
            return
        shard_set = self._impl.shard_set
        shard_set.engine.zero_grads(shard_set.param_indices(), set_to_none=set_to_none)
        shard_set.extra_params.zero(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` over this optimizer's parameters. Collective.

        Returns the total norm, the same bits on every rank.
        """
        engine = self._impl.engine
        shard_set = self._impl.shard_set
        is_plain = self._given_back() is not None
        if not is_plain:
            self._impl.finish_grads()
        if is_plain or not (shard_set.sharded or engine.local_parts.has_parts or engine.model_parallel.collectives):
            return torch.nn.utils.clip_grad_norm_(shard_set.params(), max_norm, norm_type, error_if_nonfinite)
        grads = owned_grads(shard_set)
        norm = norm_of_grads(shard_set, grads, norm_type)
        if error_if_nonfinite:
            engine.collectives.wait_for_device(engine.device, "all-gather")
            check_finite(norm, norm_type)
        with torch.no_grad():
            scale_to_norm_([*grads.values(), *shard_set.extra_params.grads()], norm, max_norm)
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """As ``torch.nn.utils.clip_grad_value_`` over this optimizer's parameters."""
        if self._given_back() is not None:
            torch.nn.utils.clip_grad_value_(self._impl.shard_set.params(), clip_value)
            return
        self._impl.finish_grads()
        shard_set = self._impl.shard_set
        grads = [*owned_grads(shard_set).values(), *shard_set.extra_params.grads()]
        if grads:
            torch._foreach_clamp_min_(grads, -clip_value)
            torch._foreach_clamp_max_(grads, clip_value)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of this optimizer's reduced gradients: a scalar, the same bits on every rank. Collective."""
        self._impl.finish_grads()
        shard_set = self._impl.shard_set
        return norm_of_grads(shard_set, owned_grads(shard_set), norm_type)

    def full_grad(self, param: Parameter) -> Tensor | None:
        """Returns the full reduced gradient of a parameter, in memory of its own; None if it has none. Collective."""
        return full_grad(self._impl.engine, param)

    def unscale_grads_(self, inv_scale: Tensor) -> Tensor:
        """Multiplies the gradients by ``inv_scale``, for gradient scalers. Collective.

        Returns a (1,) fp32 tensor: 1.0 on all ranks if any gradient is not finite, otherwise 0.0.
        """
        self._impl.finish_grads()
        engine = self._impl.engine
        shard_set = self._impl.shard_set
        # An extra parameter's gradient is not reduced, and may be infinite on only one rank.
        agreeing = engine.collectives if shard_set.extra_params.params else shard_set.owner_collectives
        grads = [*owned_grads(shard_set).values(), *shard_set.extra_params.grads()]
        found_inf = unscale_grads_(grads, inv_scale, agreeing, engine.device)
        for ranks in engine.model_parallel.collectives:
            ranks.all_reduce_max(found_inf).wait()
        return found_inf

    def wait_for_found_inf(self) -> None:
        """For gradient scalers: comes before they read on the host what :meth:`unscale_grads_` has found."""
        engine = self._impl.engine
        engine.collectives.wait_for_device(engine.device, "all-reduce")
        if self._impl.has_replicas:
            self._impl.note_scaler()

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
        shard_set = self._impl.shard_set
        if not shard_set.has_shards:  # the user's optimizer calls its hooks itself
            return whole_state(shard_set, shard_set.inner.state_dict)

        def save() -> dict[str, Any]:
            return whole_state(shard_set, lambda: shard_set.full_state(self._gather(STATE)))

        with shard_set.calls_allowed():
            return with_device(save_with_hooks(shard_set.inner, self, save))

    def _gather(self, what: str) -> Gather | None:
        """Returns a Gather, when all ranks have reached this call; None where every rank has all of the state."""
        engine = self._impl.engine
        shard_set = self._impl.shard_set
        if not shard_set.sharded:
            return None
        # By number: one rank's call for the first of two optimizers must not meet another's for the second.
        which = f" (number {self._number})" if self._number > 1 else ""
        engine.collectives.require_all_ranks(f"{what} of a sharded optimizer{which}")
        return gather_from(engine)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch DDP would have saved it and keeps this rank's shards. Collective.

        Every rank passes the full state, or the result of :meth:`state_dict` on that rank, or a copy of it: a rank
        whose state has no entries of the model's parameters gets rank 0's.

        Raises:
            CheckpointError: if groups or shapes do not fit; on all ranks, if one has other entries. Nothing is changed
                then.
        """
        shard_set = self._impl.shard_set
        plain = self._given_back()
        if plain is not None:
            plain.load_state_dict(state_dict)
            return
        state_dict = without_device(state_dict)
        is_complete = "state" in state_dict
        if is_complete:  # otherwise a hook converts it from another format
            state_dict = self._completed(state_dict)
        if not shard_set.has_shards:
            shard_set.inner.load_state_dict(parts_of_state(shard_set, state_dict))
            return

        def load(saved: dict[str, Any]) -> None:
            saved = saved if is_complete else self._completed(saved)
            load_full_state(shard_set, parts_of_state(shard_set, saved))

        with shard_set.calls_allowed():
            load_with_hooks(shard_set.inner, self, state_dict, load)

    @contextlib.contextmanager
    def every_rank_has_state(self) -> Iterator[None]:
        """Makes loads send nothing while this is open, since each rank has read the full state from a file.

        So a rank that handles an exception may load without the others.
        """
        self._loads_by_itself = True
        try:
            yield
        finally:
            self._loads_by_itself = False

    def _completed(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns ``state_dict``, with rank 0's state if this rank's has no entries. Collective if it is sharded."""
        if not self.is_sharded or self._loads_by_itself:
            return state_dict
        return completed_state(self._impl.shard_set, state_dict)

    def main_params(self) -> dict[str, Tensor]:
        """Gathers the full fp32 main params of 16-bit weights, by parameter name, in rank 0's host memory.

        Empty on other ranks. All ranks call this together, as :meth:`state_dict`.
        """
        shard_set = self._impl.shard_set
        if not self._has_main_params():
            return {}

        def of_parts() -> dict[str, Tensor] | None:
            gather = self._gather(MAIN_PARAMS)
            found = shard_set.full_main_params(gather) | to_host(shard_set.pending_main_params)
            return found if gather is None or gather.is_root else None

        return whole_main_params(shard_set, of_parts)

    def _has_main_params(self) -> bool:
        """Returns True if some rank has main params. Collective over a pipeline's ranks."""
        shard_set = self._impl.shard_set
        layout = self._impl.engine.layout
        apart = map(layout.has_separate_main, range(len(layout.params)))
        return has_main_params(shard_set, bool(shard_set.pending_main_params) or any(apart))

    def load_main_params(self, main_params: dict[str, Tensor]) -> None:
        """Loads saved main params where they round to the present weights; elsewhere the weights are kept.

        Collective, as :meth:`load_state_dict`; a rank that passes none gets rank 0's.
        """
        shard_set = self._impl.shard_set
        exchanges = self.is_sharded and not self._loads_by_itself
        if exchanges and not self.is_closed and self._has_main_params():
            main_params = dict(as_on_rank_zero(shard_set, main_params, MAIN_PARAMS))
        shard_set.load_main_params(parts_of_main_params(shard_set, main_params))

    def sharded_state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of the state by parameter name.

        For ``torch.distributed.checkpoint.save`` or ``async_save``. The keys are ``state``, ``param_groups`` and, for
        16-bit weights, ``main_params``. Nothing is copied or sent; tensors are the optimizer's own. The part of a
        tensor-parallel parameter has its place in the full one; a pipeline's stage returns the state of its own
        parameters. Collective over a pipeline's stages.
        """
        return state_to_write(self._impl.shard_set)

    def load_sharded(self, path: str | Directory | OpenDirectory, key: str = "optimizer") -> None:
        """Reads a state with :meth:`read_sharded`, and loads it."""
        self.read_sharded(path, key)()

    def read_sharded(self, path: str | Directory | OpenDirectory, key: str = "optimizer") -> Callable[[], None]:
        """Reads a state of :meth:`sharded_state_dict`, saved under ``key``, on any number of ranks or under FSDP.

        Each rank reads its part; ``path`` may be a URL, for fsspec. Returns a function that loads it, to be called
        after the weights are loaded: where a saved main param does not round to the weight, the weight is kept.

        Raises:
            CheckpointError: if it cannot be read, or is of another model.
        """
        return read_state(self._impl.shard_set, open_directory(path), key)

    def __copy__(self) -> torch.optim.Optimizer:
        """Returns a copy of the user's optimizer, which refuses if it has shards or main params."""
        return copy.copy(self._impl.inner)

    def __setstate__(self, state: dict[str, Any]) -> NoReturn:
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
