"""Hooks that report accumulated gradients to a reducer.

[Note: why gradient hooks run last]
torch runs the hooks of a parameter in the order of their registration. The hook for the last gradient of a bucket sends
the bucket, so a user's hook that was registered later would find ``.grad`` gone, or None. Under torch DDP, whose hook
is of another kind, a user's hook sees this rank's gradient and may change it. So these hooks move to the end again
when others were registered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle


class GradListener(Protocol):
    """The method of a reducer that hooks call."""

    def on_grad_accumulated(self, index: int, param: Tensor) -> None:
        """Called when the gradient of the parameter with this index has been accumulated."""


class GradHook:
    """A parameter's hook, with a weak reference, so that a model that is never closed is freed."""

    def __init__(self, reducer: GradListener, index: int) -> None:
        self.reducer = self.megastrategy_reducer = weakref.ref(reducer)
        self._index = index

    def __call__(self, param: Tensor) -> None:
        reducer = self.reducer()
        if reducer is not None:
            reducer.on_grad_accumulated(self._index, param)


class GradHooks:
    """The hooks of one reducer, one per parameter; see [Note: why gradient hooks run last]."""

    def __init__(self, reducer: GradListener) -> None:
        self._reducer = weakref.ref(reducer)  # which has this object
        self._handles: list[RemovableHandle] = []
        self._hooks_of: list[dict[int, Any]] = []  # by parameter, torch's dictionary of all its hooks
        self._num_hooks = 0

    def extend(self, params: Sequence[Parameter]) -> None:
        """Registers hooks for more parameters, numbered on from the present ones."""
        reducer = self._reducer()
        assert reducer is not None, "it calls this"
        for index, param in enumerate(params, len(self._handles)):
            self._handles.append(param.register_post_accumulate_grad_hook(GradHook(reducer, index)))
            hooks = param._post_accumulate_grad_hooks
            assert hooks is not None, "it has one"
            self._hooks_of.append(hooks)
        self._num_hooks = sum(map(len, self._hooks_of))

    @property
    def has_others(self) -> bool:
        """Whether a parameter has other hooks of this kind, at the last :meth:`move_to_end`."""
        return self._num_hooks > len(self._handles)

    def move_to_end(self) -> None:
        """Moves behind the hooks that were registered since."""
        # A count is cheap enough before every forward, for thousands of parameters.
        if (num_hooks := sum(map(len, self._hooks_of))) == self._num_hooks:
            return
        self._num_hooks = num_hooks
        for handle, hooks in zip(self._handles, self._hooks_of, strict=True):
            # Removed and inserted: torch iterates over the plain dictionary, which move_to_end does not change.
            if next(reversed(hooks), None) != handle.id and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)

    @staticmethod
    def restore(params: Sequence[Parameter]) -> None:
        """Registers all hooks of these parameters with autograd again, which has lost them after a swap of tensors."""
        for param in params:
            param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooks_of = []
        self._num_hooks = 0


def reducers_of(param: Parameter) -> list[Any]:
    """Returns the reducer, if it is alive and not closed, whose hook the parameter has: at most one."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    reducers = [getattr(hook, "megastrategy_reducer", lambda: None)() for hook in hooks]
    return [reducer for reducer in reducers if reducer is not None]


def is_wrapped(param: Parameter) -> bool:
    """Whether the parameter belongs to a wrapped model."""
    return bool(reducers_of(param))
