"""Step hooks and wrappers that user code installs on an optimizer, and how they are kept from seeing shards.

[Note: hooks around shards]
torch's optimizers run hooks in the class's own ``step``: first the global ones, then those of the object, and at the
end the post hooks. A wrapper that replaces ``optimizer.step`` calls that ``step`` in the end. So the last pre hook and
the first post hook are the closest to the arithmetic, and all other hooks and wrappers are outside of them.
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


class InnermostCall:
    """Enters ``context`` around the class's own ``step`` while this is open; see [Note: hooks around shards].

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
        # Registered last, it is the last pre hook; the post hook is moved to the front.
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
        # The step raised. Even if a wrapper caught that, other ranks wait for weights, as after any step.
        self._leave(kind, error, where)
