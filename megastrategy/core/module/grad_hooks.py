"""The hooks of parameters, which run when a gradient is in ``.grad``; and which reducer a parameter belongs to."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")
_version = operator.attrgetter("_version")


class GradHooks:
    """One hook for each parameter of a module, behind those of user code.

    Args:
        params: a list to which parameters may be appended.
    """

    def __init__(self, params: list[Parameter]) -> None:
        self._params = params
        self._handles: list[RemovableHandle] = []
        self._num_hooks = 0
        self._versions: list[int] = []  # of the parameters when a backward began, if user code has hooks
        self._swap_guards: list[weakref.ref[Parameter]] = []

    def guard(self, params: Sequence[Parameter]) -> None:
        """Makes ``torch.utils.swap_tensors`` refuse these parameters, which would lose their hooks."""
        # It refuses a tensor to which a weak reference exists.
        self._swap_guards += map(weakref.ref, params)

    def set(self, hooks: Sequence[Callable[[Tensor], None]], owner: weakref.ref[Any]) -> None:
        """Registers the hook of each parameter, or replaces the present one. ``owner``: see :func:`owners_of`."""
        for hook in hooks:
            hook.megastrategy_owner = owner  # type: ignore[attr-defined]
        # Replaced, not registered anew: torch registers no hook on a parameter that is frozen for a while.
        for handle, registered, hook in zip(self._handles, map(_hooks_of, self._params), hooks, strict=False):
            registered[handle.id] = hook
        for param, hook in list(zip(self._params, hooks, strict=True))[len(self._handles) :]:
            self._handles.append(param.register_post_accumulate_grad_hook(hook))
        self._num_hooks = self._count()

    def begin_backward(self) -> None:
        """Moves the hooks behind those of user code, which may still change the gradient or step the parameter."""
        num_hooks = self._count()
        if num_hooks != self._num_hooks:
            self._num_hooks = num_hooks
            for handle, registered in zip(self._handles, map(_hooks_of, self._params), strict=True):
                # Removed and inserted: torch iterates over the plain dictionary, which move_to_end does not change.
                if next(reversed(registered), None) != handle.id and handle.id in registered:
                    registered[handle.id] = registered.pop(handle.id)
        has_users_hooks = num_hooks > len(self._handles)
        self._versions = list(map(_version, self._params)) if has_users_hooks else []

    @property
    def watches_steps(self) -> bool:
        """Whether :meth:`is_stepped` compares anything in this backward."""
        return bool(self._versions)

    def is_stepped(self, index: int) -> bool:
        """Whether a parameter has changed since the backward began, where user code has hooks."""
        return bool(self._versions) and self._params[index]._version != self._versions[index]

    def _count(self) -> int:
        return sum(map(len, filter(None, map(_hooks_of, self._params))))

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._swap_guards.clear()


def owners_of(param: Parameter) -> list[Any]:
    """Returns the owner of the hook that the parameter has, if it is alive and not closed: at most one."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    owners = [getattr(hook, "megastrategy_owner", lambda: None)() for hook in hooks]
    return [owner for owner in owners if owner is not None]


def is_wrapped(param: Parameter) -> bool:
    """Whether the parameter belongs to a wrapped model."""
    return bool(owners_of(param))
