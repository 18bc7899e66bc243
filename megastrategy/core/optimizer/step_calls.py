"""Calls of an optimizer's ``step``: its closure, and hooks and wrappers of user code, which must not see shards.

[Note: hooks around shards]
torch's optimizers run hooks in the class's own ``step``: first the global ones, then those of the object, and at the
end the post hooks. A wrapper that replaces ``optimizer.step`` calls that ``step`` in the end. So the last pre hook and
the first post hook are the closest to the arithmetic, and all other hooks and wrappers are outside of them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_MAY_SEE_SHARDS = "megastrategy_may_see_shards"

H = TypeVar("H", bound=Callable[..., None])

Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional arguments and keyword arguments of one call."""


def split_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Callable[[], Any] | None, Arguments]:
    """Returns the closure, None if there is none, and the other arguments. In front of them None keeps its place."""
    if "closure" in kwargs:
        return kwargs["closure"], (args, {name: value for name, value in kwargs.items() if name != "closure"})
    if args and callable(args[0]):  # anything else in front is an argument of the user's class
        return args[0], ((None, *args[1:]), kwargs)
    return None, (args, kwargs)


def with_closure(closure: Callable[[], Any], others: Arguments) -> Arguments:
    """Returns the arguments with a closure again."""
    args, kwargs = others
    return ((closure, *args[1:]), kwargs) if args and args[0] is None else (args, {**kwargs, "closure": closure})


def has_others(others: Arguments) -> bool:
    """Whether there are arguments beside the closure's place."""
    args, kwargs = others
    return bool(kwargs) or any(arg is not None for arg in args)


def may_see_shards(hook: H) -> H:
    """Marks a global hook that reads neither gradients nor weights, so that it may run beside shards."""
    setattr(hook, _MAY_SEE_SHARDS, True)
    return hook


def has_user_hooks(optimizer: Optimizer) -> bool:
    """Returns True if a hook or wrapper of user code may see the steps of this sharded optimizer."""
    own_hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    others = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    if own_hooks > 1 or not all(getattr(hook, _MAY_SEE_SHARDS, False) for hook in others):  # one refuses direct use
        return True
    # A scheduler's wrapper only counts calls; other wrappers may do anything.
    wrapper = optimizer.__dict__.get("step")
    while getattr(getattr(wrapper, "__code__", None), "co_filename", None) == lr_scheduler.__file__:
        wrapper = getattr(wrapper, "__wrapped__", None)
    return not (wrapper is None or wrapper is type(optimizer).step)


@contextlib.contextmanager
def innermost_call(
    optimizer: Optimizer, context: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Enters ``context`` around the class's own ``step`` while this is open; see [Note: hooks around shards].

    A class whose ``step`` calls its base's has hooks in both; the outer one counts.
    """
    depth, entered = 0, contextlib.ExitStack()

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            entered.enter_context(context())

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            entered.close()

    handles = [optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(leave)]
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    # Registered last, it is the last pre hook; the post hook is moved to the front.
    assert next(reversed(before)) == handles[0].id
    assert isinstance(after, OrderedDict)
    after.move_to_end(handles[1].id, last=False)
    # Left here if the step raised: even if a wrapper caught that, other ranks wait for weights, as after any step.
    with entered:
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
