"""The hooks that tell a reducer which gradients have been accumulated.

[Note: last among the hooks]
torch runs the hooks of a parameter in the order in which they were registered. The last gradient of a bucket sends it,
so that a hook of the user's that came later would find a gradient that is gone, or None, and many then do nothing.
Under torch DDP, whose hook is of another kind, it sees this rank's gradient and may change it. So ours go to the end
again when others have come.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle


class CountsGrads(Protocol):
    """A reducer."""

    def on_grad_accumulated(self, index: int, param: Tensor) -> None:
        """The gradient of the parameter with this index has been accumulated."""


class GradHook:
    """A parameter's hook. Its reference is weak, or a model that is never closed would never be freed."""

    def __init__(self, reducer: CountsGrads, index: int) -> None:
        self.reducer, self._index = weakref.ref(reducer), index

    def __call__(self, param: Tensor) -> None:
        reducer = self.reducer()
        if reducer is not None:
            reducer.on_grad_accumulated(self._index, param)


class GradHooks:
    """The hooks of one reducer, one a parameter; see [Note: last among the hooks]."""

    def __init__(self, reducer: CountsGrads) -> None:
        self._reducer = weakref.ref(reducer)  # which has this object
        self._handles: list[RemovableHandle] = []
        self._hooks_of: list[dict[int, Any]] = []  # by parameter, torch's dictionary of all its hooks
        self._num_hooks = 0

    def extend(self, params: Sequence[Parameter]) -> None:
        """Watches more parameters, whose numbers follow those known so far."""
        reducer = self._reducer()
        assert reducer is not None, "it calls this"
        for index, param in enumerate(params, len(self._handles)):
            self._handles.append(param.register_post_accumulate_grad_hook(GradHook(reducer, index)))
            hooks = param._post_accumulate_grad_hooks
            assert hooks is not None, "it has one"
            self._hooks_of.append(hooks)
        self._num_hooks = sum(map(len, self._hooks_of))

    def stay_last(self) -> None:
        """Goes behind the hooks that were registered since; cheap where there are none."""
        # Counted, since this comes before every forward, for thousands of parameters.
        if (num_hooks := sum(map(len, self._hooks_of))) == self._num_hooks:
            return
        self._num_hooks = num_hooks
        for handle, hooks in zip(self._handles, self._hooks_of, strict=True):
            # Taken out and put in: torch walks the plain dictionary, which move_to_end leaves as it is.
            if next(reversed(hooks), None) != handle.id and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)

    @staticmethod
    def revive(params: Sequence[Parameter]) -> None:
        """Tells autograd of all hooks of these parameters again, others' too, of which it has forgotten."""
        for param in params:
            param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks

    def remove(self) -> None:
        """Tells the reducer of nothing more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooks_of, self._num_hooks = [], [], 0


def reducers_of(param: Parameter) -> list[Any]:
    """The reducers, alive and not closed, that count the gradient of this parameter: at most one."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    found = [hook.reducer() for hook in hooks if isinstance(hook, GradHook)]
    return [reducer for reducer in found if reducer is not None]


def is_wrapped(param: Parameter) -> bool:
    """Whether a wrapped model counts the gradient of this parameter."""
    return bool(reducers_of(param))
