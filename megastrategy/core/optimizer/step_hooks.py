"""Hooks and wrappers of a user's optimizer, and how shards are hidden from them.

[Note: hooks around shards]
torch's optimizers run hooks in the class's own ``step``: the global ones before those of the object, and after them at
the end. A wrapper that user code has put in the place of ``optimizer.step`` calls that ``step`` in the end. So the last
hook before and the first one after are what is nearest to the arithmetic, and all watchers are outside of them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_MAY_SEE_SHARDS = "megastrategy_may_see_shards"

H = TypeVar("H", bound=Callable[..., None])


def may_see_shards(hook: H) -> H:
    """Marks a hook on all optimizers that asks for neither gradients nor weights: steps are the same with it."""
    setattr(hook, _MAY_SEE_SHARDS, True)
    return hook


def has_user_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook or wrapper of user code may see the steps of an optimizer inside of a ShardedOptimizer."""
    own_hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    others = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    if own_hooks > 1 or not all(getattr(hook, _MAY_SEE_SHARDS, False) for hook in others):  # one refuses direct use
        return True
    # A scheduler's wrapper notes that there was a call; what any other wrapper does is not known.
    wrapper = optimizer.__dict__.get("step")
    while getattr(getattr(wrapper, "__code__", None), "co_filename", None) == lr_scheduler.__file__:
        wrapper = getattr(wrapper, "__wrapped__", None)
    return not (wrapper is None or wrapper is type(optimizer).step)


class InnermostCall:
    """While this is open, ``context`` is entered around the class's own ``step``; see [Note: hooks around shards].

    A class whose ``step`` calls its base's has hooks in both; the outer one counts.
    """

    def __init__(self, optimizer: Optimizer, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._optimizer, self._context = optimizer, context
        self._entered: contextlib.AbstractContextManager[None] | None = None
        self._depth = 0
        self._handles: list[Any] = []

    def __enter__(self) -> InnermostCall:
        before, after = self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before),
            self._optimizer.register_step_post_hook(self._after),
        ]
        # The last of those before, as it is registered last; the first of those after.
        assert next(reversed(before)) == self._handles[0].id
        assert isinstance(after, OrderedDict)
        after.move_to_end(self._handles[1].id, last=False)
        return self

    def _before(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            entered = self._context()
            entered.__enter__()
            self._entered = entered

    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._leave(None, None, None)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(kind, error, where)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        # The step raised. A wrapper may have kept that to itself: then other ranks wait for weights, as after any step.
        self._leave(kind, error, where)
