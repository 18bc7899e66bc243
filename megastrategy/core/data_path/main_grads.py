"""Gradients of layers that add them to ``main_grad`` themselves; see buffers' [Note: layers that add to main_grad].

[Note: .grad of a weight whose layer adds its gradient]
The record is the same as that of other parameters: ``.grad`` is ``main_grad`` (with a plan, the view of the buffer)
once a layer has added to it. Autograd must not add the tensor of any content that the layer returns. So it is None
while autograd puts that tensor there: a hook before it sets None, and a hook after it drops the tensor if the layer has
added, and adds it if not. ``main_grad`` has to contain zeros before the first kernel runs, that is when a backward
begins at an output of the forward.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ..buffers.main_grads import (
    has_main_grad,
    no_place_for_main_grad,
    pop_added_flag,
    remove_main_grad,
    set_main_grad,
)
from ..buffers.reduced_grad import ReducedGrad
from ..errors import MainGradError
from ..layout import BufferLayout
from ..module import LocalParts
from .bucket import Bucket, State


@dataclasses.dataclass(eq=False)
class _Fused:
    """A weight whose layer adds its gradient to ``main``; ``face``: the same as a value of ``.grad``."""

    param: Parameter
    name: str
    main: Tensor
    face: Tensor
    handle: RemovableHandle | None = None
    bucket: Bucket | None = None


class MainGrads:
    """The weights of one module whose layers add their gradients themselves."""

    def __init__(self, parts: LocalParts) -> None:
        self._parts = parts
        self._fused: dict[int, _Fused] = {}  # by parameter
        self._is_open = False  # from the begin of a backward at an output, until its end

    def __bool__(self) -> bool:
        return bool(self._fused)

    def include(self, layout: BufferLayout, params: Sequence[Parameter], first: int, *, have_place: bool) -> None:
        """Includes the parameters from number ``first`` on, with memory of their own until there is a plan.

        Raises:
            ValueError: if a layer adds gradients and these do not accumulate in a buffer.
        """
        for index in range(first, len(params)):
            param = params[index]
            if not has_main_grad(param):
                continue
            spec = layout.params[index]
            if not have_place:
                raise no_place_for_main_grad(spec.name)
            main = torch.empty_strided(spec.shape, spec.stride, dtype=spec.grad_dtype, device=param.device).zero_()
            fused = self._fused[index] = _Fused(param, spec.name, main, self._parts.as_grad(param, main))
            fused.handle = param.register_hook(_clearing_hook(fused))
            set_main_grad(param, main)

    def place(self, views: Sequence[Tensor], bucket_of: Callable[[int], Bucket]) -> None:
        """Moves ``main_grad`` into the buffers; ``views``: by parameter. Gradients are copied when they are sent."""
        for index, fused in self._fused.items():
            if fused.bucket is None:
                remove_main_grad(fused.param, fused.main)
                fused.main = views[index]
                fused.bucket = bucket_of(index)
                fused.bucket.has_main_grads = True
                fused.face = fused.bucket.face(index)
                set_main_grad(fused.param, fused.main)

    # --- a backward ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepares memory to which layers add, when a backward has begun at an output, and buckets are open."""
        unused = []
        for fused in self._fused.values():
            if pop_added_flag(fused.param):
                raise _error(
                    fused.name,
                    "before the backward of any output of the model's forward, or in one that then raised: compute the "
                    "loss from what the wrapped model returned, and call zero_grad() after an error",
                )
            grad = fused.param.grad
            if grad is fused.face or (fused.bucket is not None and fused.bucket.state is not State.OPEN):
                continue
            if grad is None or isinstance(grad, ReducedGrad):
                unused.append(fused.main)
            else:
                fused.main.copy_(self._parts.local_view(grad))
                fused.param.grad = fused.face
        if unused:
            torch._foreach_zero_(unused)
        self._is_open = True

    def check_begun(self) -> None:
        """Raises MainGradError for a backward that began at no output: a kernel may have run before any hook."""
        if self._fused and not self._is_open:
            raise _error(
                next(iter(self._fused.values())).name,
                "or will, in a backward that starts from no output of the model's forward: compute the loss from what "
                "the wrapped model returned",
            )

    def end(self) -> None:
        """Called when a backward has ended."""
        self._is_open = False

    def hook(self, index: int, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Returns the hook for a parameter's gradient, which calls ``hook``."""
        fused = self._fused.get(index)
        return hook if fused is None else self._adding_hook(fused, hook)

    def _adding_hook(self, fused: _Fused, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        parts = self._parts
        this = weakref.ref(self)  # weak in hooks: a model that is never closed is freed
        fused_ref = weakref.ref(fused)

        def on_grad(param: Any) -> None:
            main_grads = this()
            fused = fused_ref()
            if main_grads is None or fused is None:
                return
            main_grads.check_begun()
            is_added = pop_added_flag(param)
            if fused.bucket is None or fused.bucket.state is State.OPEN:
                if not is_added and param.grad is not None:
                    fused.main.add_(parts.local_view(param.grad))
                param.grad = fused.face
            elif is_added:
                raise _error(
                    fused.name,
                    "after its bucket had been sent (a layer used by two re-entrant checkpoints): use "
                    "checkpoint(use_reentrant=False)",
                )
            hook(param)

        return on_grad

    # --- around backwards ---------------------------------------------------------------------------------------------

    def forget(self, params: Collection[Parameter]) -> None:
        """Forgets what layers have added for these parameters, whose gradients are dropped."""
        if self._fused:
            dropped = set(map(id, params))
            for fused in self._fused.values():
                if id(fused.param) in dropped:
                    pop_added_flag(fused.param)

    def close(self) -> None:
        """Removes ``main_grad`` and the hooks."""
        for fused in self._fused.values():
            remove_main_grad(fused.param, fused.main)
            if fused.handle is not None:
                fused.handle.remove()
        self._fused = {}


def _clearing_hook(fused: _Fused) -> Callable[[Tensor], None]:
    fused_ref = weakref.ref(fused)

    def before_grad(_: Tensor) -> None:
        fused = fused_ref()
        if fused is not None and (fused.param.grad is fused.face or isinstance(fused.param.grad, ReducedGrad)):
            fused.param.grad = None

    return before_grad


def _error(name: str, when: str) -> MainGradError:
    return MainGradError(f"parameter {name!r}: its layer added a gradient to main_grad {when}")
