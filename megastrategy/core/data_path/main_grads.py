"""Gradients of layers that add them to ``main_grad`` themselves.

[Note: layers that add to main_grad]
In layers of Transformer Engine (``fuse_wgrad_accumulation=True``) and of Megatron-LM (``gradient_accumulation_fusion``)
the kernel that computes a weight's gradient adds it to the accumulated gradient, so that no 16-bit gradient is written
and read again. The contract is Megatron-LM's: ``weight.main_grad`` is the memory to add to, of the gradient dtype. A
layer that has added sets ``weight.grad_added_to_main_grad``, and returns a tensor of any content instead of the
gradient, so that autograd runs the hooks.

So these weights have no ``.grad`` while a backward runs. A tensor that autograd puts there is dropped if the layer
has added, and added if it has not (a bias of such a layer). The memory has to contain zeros, or the sums of
earlier microbatches, when the first layer's backward runs. That is before any parameter's hook, but after the
gradients of the forward's outputs.

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
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ..errors import MainGradError
from ..layout import BufferLayout
from ..module import LocalParts
from .bucket import Bucket, State
from .reduced_grad import ReducedGrad

_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")
"""The attributes by which modules of Transformer Engine and of Megatron-LM say that they add to ``main_grad``."""


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
        if not self._is_open:
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


def declare_main_grads(module: nn.Module) -> list[Any]:
    """Sets ``grad_added_to_main_grad = False`` on parameters of modules that add gradients, and returns those that
    lacked it. Layers of other kinds have to set it on their weights themselves, before the model is wrapped."""
    adding = (child for child in module.modules() if any(getattr(child, name, False) is True for name in _FUSED))
    params = (param for child in adding for param in child._parameters.values() if param is not None)
    declared: list[Any] = [param for param in params if not has_main_grad(param)]
    for param in declared:
        param.grad_added_to_main_grad = False
    return declared


def withdraw_main_grads(declared: list[Any]) -> None:
    """Reverts :func:`declare_main_grads`, so that a layer that is switched off is an ordinary one again."""
    for param in declared:
        del param.grad_added_to_main_grad


def no_place_for_main_grad(name: str) -> ValueError:
    """Returns the error for gradients that do not accumulate in a buffer."""
    return ValueError(
        f"parameter {name!r}: its layer adds the gradient to main_grad itself, which has to be in a contiguous buffer. "
        'Use grad_buffer="contiguous" and use_contiguous_buffers=True, the defaults, or switch it off in the layer '
        "(fuse_wgrad_accumulation=False, gradient_accumulation_fusion=False)"
    )


def has_main_grad(param: Parameter) -> bool:
    """Whether a layer may add the gradient of the parameter itself."""
    return hasattr(param, "grad_added_to_main_grad")


def set_main_grad(param: Any, place: Tensor) -> None:
    """Makes layers add the parameter's gradient to ``place`` from now on."""
    param.main_grad = place


def remove_main_grad(param: Any, place: Tensor) -> None:
    """Removes ``place`` from the parameter, if it is still its ``main_grad``."""
    if getattr(param, "main_grad", None) is place:
        del param.main_grad


def pop_added_flag(param: Any) -> bool:
    """Returns whether the layer has added a gradient since the last call."""
    is_added = bool(param.grad_added_to_main_grad)
    param.grad_added_to_main_grad = False
    return is_added
