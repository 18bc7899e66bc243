"""Layers that add the gradients of their weights to ``main_grad`` themselves.

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
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")
"""The attributes by which modules of Transformer Engine and of Megatron-LM say that they add to ``main_grad``."""


def declare_main_grads(module: nn.Module) -> list[Any]:
    """Sets ``grad_added_to_main_grad = False`` on parameters of modules that add gradients, and returns those that
    lacked it. Layers of other kinds have to set it on their weights themselves, before the model is wrapped."""
    adding = (child for child in module.modules() if any(getattr(child, name, False) is True for name in _FUSED))
    own = (param for child in adding for param in child._parameters.values() if param is not None)
    declared: list[Any] = [param for param in own if not has_main_grad(param)]
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
    added, param.grad_added_to_main_grad = bool(param.grad_added_to_main_grad), False
    return added
