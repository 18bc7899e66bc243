"""Forwards methods and attributes of the user's optimizer beyond torch's interface.

[Note: methods of the user's optimizer]
A :class:`~megastrategy.DistributedOptimizer` is also an instance of the user's class, so every method of that class
would run on it. So the class that joins the two has a forwarding member for each of these methods, properties and
attributes, which calls the user's object.

``train()`` and ``eval()`` (Schedule-Free) move weights by their state. If they change an option or an attribute, they
are called while the groups contain this rank's shards, and the buckets are gathered afterwards: such a call is
collective. Trials at the wrap have shown that they work element by element, and record the mode
(elementwise's ``_check_modes``). All other members see the model's Parameters, and a state in which a look-up by one
raises; a gradient that was reduced raises by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import OptimizerNotShardableError
from ..shards import take_outside_changes
from .guarded_state import GuardedState
from .shard_set import ShardSet
from .unsharded_step import main_params_with_grads

_MODES = ("train", "eval")


def forwarding_members(kind: type[Optimizer], known: type[Optimizer]) -> dict[str, Any]:
    """Makes forwarding members for all that the user's class ``kind`` has and ``known`` does not."""
    members: dict[str, Any] = {}
    if kind.zero_grad is not Optimizer.zero_grad:
        members["zero_grad"] = _method("zero_grad", kind.zero_grad)  # Accelerate reads its signature
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
        shard_set: ShardSet = self._impl.shard_set
        call = functools.partial(getattr(shard_set.inner, name), *args, **kwargs)
        if shard_set.has_shards and name in _MODES:
            return _change_mode(shard_set, f"{name}()", call)
        with _state_guarded(shard_set, f"{name}()"):
            result = call()
        if shard_set.has_shards and isinstance(result, Iterator | contextlib.AbstractContextManager):
            raise OptimizerNotShardableError(
                f"{name}() of {type(shard_set.inner).__name__} returns a context manager or a generator, which would "
                f"use the optimizer later, and it steps shards. Pass {shard_set.engine.all_reduce_option}"
            )
        return self if result is shard_set.inner else result  # so that chained calls are forwarded

    return forward


def _attribute(name: str) -> property:
    def get(self: Any) -> Any:
        with _state_guarded(self._impl.shard_set, name):
            return getattr(self._impl.inner, name)

    def put(self: Any, value: Any) -> None:
        with _state_guarded(self._impl.shard_set, name):
            setattr(self._impl.inner, name, value)

    return property(get, put)


@contextlib.contextmanager
def _state_guarded(shard_set: ShardSet, name: str) -> Iterator[None]:
    """Makes look-ups of the state by a Parameter raise while this is open, if something else is stepped in its place.

    Raises:
        OptimizerNotShardableError: if the optimizer's state was replaced meanwhile.
    """
    if not shard_set.has_shards:
        yield
        return
    inner = shard_set.inner
    shard_set.states.split()
    state = inner.state
    guarded: Any = GuardedState(shard_set)
    inner.state = guarded
    try:
        yield
        is_replaced = inner.state is not guarded
    finally:
        inner.state = state
    if is_replaced:
        raise OptimizerNotShardableError(
            f"{name} of {type(inner).__name__} replaces the state of shards. Assign optimizer.state instead"
        )


def _change_mode(shard_set: ShardSet, name: str, call: Callable[[], Any]) -> Any:
    """Calls ``train()`` or ``eval()``; see [Note: methods of the user's optimizer]."""
    # Loops call train() before every step.
    if not _changes_options(shard_set, call):
        return None
    engine = shard_set.engine
    engine.check_open()
    if shard_set.states.storage is not None:  # on all ranks alike
        raise OptimizerNotShardableError(
            f"{name} of {type(shard_set.inner).__name__} cannot be used: it works on state, and "
            "offload_optimizer_states keeps that on the host between steps. Leave this option out"
        )
    if shard_set.sharded:
        # A rank that calls this without the others would wait for weights that they never send.
        engine.collectives.require_all_ranks(f"{name} of a sharded {type(shard_set.inner).__name__}")
    shard_set.add_new_params()
    with torch.no_grad():
        return _call_on_shards(shard_set, call) if shard_set.sharded else _call_on_main_params(shard_set, call)


def _changes_options(shard_set: ShardSet, call: Callable[[], Any]) -> bool:
    """Whether a call changes options of groups or attributes, as it does with empty groups. Changes nothing."""
    inner = shard_set.inner
    holders = [vars(inner), *inner.param_groups]
    copies = [dict(holder) for holder in holders]
    with shard_set.groups_of([[] for _ in inner.param_groups]):
        call()
    changed = any(
        holder.keys() != before.keys() or any(holder[name] is not value for name, value in before.items())
        for holder, before in zip(holders, copies, strict=True)
    )
    for holder, before in zip(holders, copies, strict=True):
        holder.clear()
        holder.update(before)
    return changed


def _call_on_shards(shard_set: ShardSet, call: Callable[[], Any]) -> Any:
    engine = shard_set.engine
    indices = shard_set.param_indices()
    assert engine.param_buffers is not None, "sharded"
    # A pending gather would overwrite the results, and the call would not see parameters with new memory (p.data = x).
    engine.param_gather.finish()
    engine.param_buffers.recapture()
    # Joined state is keyed by runs; the user's method looks it up by the tensors in the groups.
    shard_set.states.split()
    shards = [shard_set.shards[index] for index in indices if index in shard_set.shards]
    with_main = (shard for shard in shards if shard_set.layout.has_separate_main(shard.param))
    mains = [(shard, shard.weights) for shard in with_main if shard.weights is not None]
    for shard, weights in mains:
        # Weights may have been written since the last step; a method on stale main params would revert that.
        take_outside_changes(shard.main, weights, weights.dtype)
    with shard_set.groups_of_shards():
        result = call()
    for shard, weights in mains:
        weights.copy_(shard.main)
    # A rank may own nothing of a bucket that others have changed, so all buckets are gathered.
    for bucket in sorted({shard_set.layout.slots[index].bucket for index in indices}, reverse=True):
        shard_set.start_gather(bucket, indices)
    engine.param_gather.finish()
    # Autograd did not see the weights change in the buffer: a backward through an earlier graph must raise.
    torch.autograd.graph.increment_version([engine.params[index] for index in indices])
    return result


def _call_on_main_params(shard_set: ShardSet, call: Callable[[], Any]) -> Any:
    """Makes the call where every rank has all parameters: on the main params of 16-bit ones."""
    engine = shard_set.engine
    with main_params_with_grads(shard_set) as shards:
        result = call()
        for shard in shards:
            engine.local_parts.local_view(engine.params[shard.param]).copy_(shard.main)
    return result
