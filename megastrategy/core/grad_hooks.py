"""The hooks that tell a reducer which gradients have been accumulated."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter


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


def is_wrapped(param: Parameter) -> bool:
    """Whether the gradient of this parameter is counted by a reducer that is alive and not closed."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    return any(isinstance(hook, GradHook) and hook.reducer() is not None for hook in hooks)
