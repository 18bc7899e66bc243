"""Forwards methods and attributes of the user's optimizer beyond torch's interface, on shards where they need them.

[Note: methods of the user's optimizer]
A :class:`~megastrategy.DistributedOptimizer` is also an instance of the user's class, so every method of that class
would run on it: with Parameters in the groups and a state keyed by shards, in which no Parameter is found.
Schedule-Free's ``eval()`` would change nothing. So the class that joins the two has a forwarding member for each of
these methods, properties and attributes, which calls the user's object.

Where the optimizer is sharded, :func:`~.method_trial.try_call` finds out what a call does. A call that needs neither
state nor parameters is made as it is. A call that works element by element is made while the groups contain this rank's
shards, and the buckets are gathered afterwards, so it is collective. All other calls are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import OptimizerNotShardableError
from ..shards import take_outside_changes
from ..trials import Call, Effect, NotForShardsError, looks_at_tensors, try_call
from .shard_set import ShardSet
from .unsharded_step import main_params_with_grads


def forwarding_members(kind: type[Optimizer], known: type[Optimizer]) -> dict[str, Any]:
    """Makes forwarding members for all that the user's class ``kind`` has and ``known`` does not."""
    members: dict[str, Any] = {}
    if kind.zero_grad is not Optimizer.zero_grad:
        members["zero_grad"] = _zero_grad(kind.zero_grad)
    for owner in kind.__mro__:
        if owner in (Optimizer, object):
            break  # ``known`` has all of torch's interface
        for name, value in vars(owner).items():
            # The most derived class comes first, as in Python's own lookup.
            if name.startswith("__") or name in members or hasattr(known, name):
                continue
            # They get no instance, and work on the joined class without a forwarding member.
            if isinstance(value, staticmethod | classmethod):
                continue
            # A class or a callable that does not bind is a value: a call of it would not pass the optimizer.
            is_method = callable(value) and hasattr(value, "__get__") and not isinstance(value, type)
            members[name] = _method(name, value) if is_method else _attribute(name)
    return members


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        def method(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return getattr(optimizer, name)(*args, **kwargs)

        result = call_inner(self._impl.shard_set, f"{name}()", Call(method, args, kwargs))
        return self if result is self._impl.inner else result  # so that chained calls are forwarded

    return forward


def _zero_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    """Forwards the user's own ``zero_grad``, with the model's Parameters in the groups, as under torch DDP."""

    @functools.wraps(function)  # Accelerate reads its signature
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        shard_set: ShardSet = self._impl.shard_set
        # A defaultdict: reading state[param] creates an entry, here for a Parameter that is not stepped.
        num_known = len(shard_set.inner.state)
        result = shard_set.inner.zero_grad(*args, **kwargs)
        if shard_set.has_shards and len(shard_set.inner.state) > num_known:
            raise OptimizerNotShardableError(
                f"zero_grad() of {type(shard_set.inner).__name__} keeps state for parameters, and what is stepped in "
                "their place has other state. Keep it elsewhere, or pass "
                f"{shard_set.engine.all_reduce_option} with fp32 weights"
            )
        return result

    return zero_grad


def _attribute(name: str) -> property:
    def get(self: Any) -> Any:
        return call_inner(self._impl.shard_set, name, Call(lambda optimizer: getattr(optimizer, name)))

    def put(self: Any, value: Any) -> None:
        call_inner(self._impl.shard_set, name, Call(lambda optimizer, value: setattr(optimizer, name, value), (value,)))

    return property(get, put)


def call_inner(shard_set: ShardSet, name: str, call: Call) -> Any:
    """Makes a call of the user's optimizer; see [Note: methods of the user's optimizer].

    Raises:
        OptimizerNotShardableError: if it would be wrong on shards, or may be.
    """
    inner = shard_set.inner
    # Every rank steps the Parameters themselves, as under torch DDP.
    if not shard_set.has_shards:
        return call(inner)
    kind = shard_set.engine.device, shard_set.layout.main_dtype
    try:
        if not shard_set.sharded:
            return _call_on_main_params(shard_set, call) if looks_at_tensors(inner, call, *kind) else call(inner)
        # Tried at each call: the effect may depend on the arguments, and on the optimizer's mode.
        effect = try_call(inner, call, *kind)
    except NotForShardsError as reason:
        raise _not_usable(shard_set, name, reason) from None
    if effect is Effect.NONE:
        return call(inner)
    return _call_on_shards(shard_set, name, call, moves=effect is Effect.ELEMENTS)


def _not_usable(shard_set: ShardSet, name: str, reason: NotForShardsError) -> OptimizerNotShardableError:
    what = f"{name} of {type(shard_set.inner).__name__} cannot be used while the optimizer"
    if not shard_set.sharded:
        return OptimizerNotShardableError(
            f"{what} steps the fp32 main params of 16-bit weights: {reason}. Keep the weights in fp32 (autocast for "
            "the forward)"
        )
    return OptimizerNotShardableError(
        f"{what} is sharded: {reason}. Pass {shard_set.engine.all_reduce_option}: every rank then has whole "
        "parameters, gradients and state, as under torch DDP"
    )


def _call_on_shards(shard_set: ShardSet, name: str, call: Call, *, moves: bool) -> Any:
    engine, indices = shard_set.engine, shard_set.param_indices()
    engine.check_open()
    assert engine.param_buffers is not None, "sharded"
    if moves:
        # A rank that calls this without the others would wait for weights that they never send.
        engine.collectives.require_all_ranks(f"{name} of a sharded {type(shard_set.inner).__name__}")
        shard_set.add_new_params()
    # A pending gather would overwrite the results, and the call would not see parameters with new memory (p.data = x).
    engine.param_gather.finish()
    engine.param_buffers.recapture()
    # Joined state is keyed by runs; the user's method looks it up by the tensors in the groups.
    shard_set.states.split()
    own = [shard_set.shards[index] for index in indices if index in shard_set.shards]
    apart = (shard for shard in own if shard_set.layout.has_separate_main(shard.param))
    mains = [(shard, shard.weights) for shard in apart if shard.weights is not None]
    if shard_set.states.storage is not None:  # on all ranks alike
        raise OptimizerNotShardableError(
            f"{name} of {type(shard_set.inner).__name__} cannot be used: it works on state, and "
            "offload_optimizer_states keeps that on the host between steps. Leave this option out"
        )
    with torch.no_grad():
        for shard, weights in mains:
            # Weights may have been written since the last step; a method on stale main params would revert that.
            take_outside_changes(shard.main, weights, weights.dtype)
        with shard_set.groups_of_shards():
            result = call(shard_set.inner)
        if not moves:
            return result
        for shard, weights in mains:
            weights.copy_(shard.main)
    # A rank may own nothing of a bucket that others have changed, so all buckets are gathered.
    for bucket in sorted({shard_set.layout.slots[index].bucket for index in indices}, reverse=True):
        shard_set.start_gather(bucket, indices)
    engine.param_gather.finish()
    # Autograd did not see the weights change in the buffer: a backward through an earlier graph must raise.
    torch.autograd.graph.increment_version([engine.params[index] for index in indices])
    return result


def _call_on_main_params(shard_set: ShardSet, call: Call) -> Any:
    """Makes the call where every rank has all parameters: on the main params of 16-bit ones, with gradients."""
    engine = shard_set.engine
    engine.check_open()
    shard_set.add_new_params()
    with torch.no_grad(), main_params_with_grads(shard_set) as own:
        result = call(shard_set.inner)
        for shard in own:
            param, part_of = engine.params[shard.param], engine.local_parts.local_view
            part = part_of(param)
            # Only changed weights: copy_ increments the version, and would invalidate graphs that are still right.
            if not torch.equal(rounded := shard.main.to(part.dtype), part):
                part.copy_(rounded)
            # The method dropped the main param's gradient (set_to_none), which means the parameter's.
            if param.grad is not None and shard.main.grad is None:
                engine.grad_buffers.clear([shard.param])
            elif param.grad is not None and shard.main.grad is not None:
                part_of(param.grad).copy_(shard.main.grad)
    return result
