"""Forwards methods and attributes of the user's optimizer beyond torch's interface.

[Note: methods of the user's optimizer]
A :class:`~megastrategy.DistributedOptimizer` is also an instance of the user's class, so every method of that class
would run on it. So the class that joins the two has a forwarding member for each of these methods, properties and
attributes, which calls the user's object.

``train()`` and ``eval()`` (Schedule-Free) move weights by their state. If they change an option or an attribute, they
are called while the groups contain this rank's runs, and the buckets are gathered afterwards: such a call is
collective. Trials at the wrap have shown that they work element by element, and record the mode. All other members see
the model's Parameters, and a state in which a look-up by one raises; a gradient that was reduced raises by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import OptimizerNotShardableError
from .guarded_state import GuardedState
from .sharded_optimizer import ShardedOptimizer

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
        optimizer: ShardedOptimizer = self._impl
        call = functools.partial(getattr(optimizer.inner, name), *args, **kwargs)
        if _steps_runs(optimizer) and name in _MODES:
            return _change_mode(optimizer, f"{name}()", call)
        with _state_guarded(optimizer, f"{name}()"):
            result = call()
        if _steps_runs(optimizer) and isinstance(result, Iterator | contextlib.AbstractContextManager):
            raise OptimizerNotShardableError(
                f"{name}() of {type(optimizer.inner).__name__} returns a context manager or a generator, which would "
                f"use the optimizer later, and it steps shards. Pass {optimizer.engine.all_reduce_option}"
            )
        return self if result is optimizer.inner else result  # so that chained calls are forwarded

    return forward


def _attribute(name: str) -> property:
    def get(self: Any) -> Any:
        with _state_guarded(self._impl, name):
            return getattr(self._impl.inner, name)

    def put(self: Any, value: Any) -> None:
        with _state_guarded(self._impl, name):
            setattr(self._impl.inner, name, value)

    return property(get, put)


def _steps_runs(optimizer: ShardedOptimizer) -> bool:
    return optimizer.has_runs and not optimizer.is_given_back


@contextlib.contextmanager
def _state_guarded(optimizer: ShardedOptimizer, name: str) -> Iterator[None]:
    """Makes look-ups of the state by a Parameter raise while this is open, if something else is stepped in its place.

    Raises:
        OptimizerNotShardableError: if the optimizer's state was replaced meanwhile.
    """
    if not _steps_runs(optimizer):
        yield
        return
    inner = optimizer.inner
    state = inner.state
    guarded: Any = GuardedState(optimizer)
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


def _change_mode(optimizer: ShardedOptimizer, name: str, call: Callable[[], Any]) -> Any:
    """Calls ``train()`` or ``eval()``; see [Note: methods of the user's optimizer]."""
    # Loops call train() before every step.
    if not _changes_options(optimizer, call):
        return None
    engine = optimizer.engine
    engine.check_open()
    if not optimizer.is_sharded:
        with torch.no_grad(), optimizer.grads_in_place():
            return call()
    # A rank that calls this without the others would wait for weights that they never send.
    engine.collectives.require_all_ranks(f"{name} of a sharded {type(optimizer.inner).__name__}")
    if any(spec.has_main_param for spec in engine.layout.params):
        engine.backwards.make_plan()
    with torch.no_grad(), optimizer.state_in_place():
        result = call()
    if engine.reducer.memory is not None:
        optimizer.gather_all()
    return result


def _changes_options(optimizer: ShardedOptimizer, call: Callable[[], Any]) -> bool:
    """Whether a call changes options of groups or attributes, as it does with empty groups. Changes nothing."""
    inner = optimizer.inner
    holders = [vars(inner), *inner.param_groups]
    copies = [dict(holder) for holder in holders]
    with optimizer.in_groups([[] for _ in inner.param_groups]), optimizer.calls_allowed():
        call()
    changed = any(
        holder.keys() != before.keys() or any(holder[name] is not value for name, value in before.items())
        for holder, before in zip(holders, copies, strict=True)
    )
    for holder, before in zip(holders, copies, strict=True):
        holder.clear()
        holder.update(before)
    return changed
