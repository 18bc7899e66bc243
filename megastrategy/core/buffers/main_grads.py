"""Layers that add the gradients of their weights themselves, to ``main_grad``.

[Note: gradients that autograd does not add]
Layers of Transformer Engine (``fuse_wgrad_accumulation=True``) and of Megatron-LM (``gradient_accumulation_fusion``)
have the kernel that computes a weight's gradient add it where it accumulates, so that no 16-bit gradient is written and
read again. The contract is Megatron-LM's: ``weight.main_grad`` is the place, of the gradient dtype. A layer that has
added sets ``weight.grad_added_to_main_grad``, and returns a tensor of any content in the gradient's place, for autograd
to run the hooks.

So while a backward runs these weights have no ``.grad``. What autograd puts there is dropped where the layer has added,
and added where it has not (a bias of such a layer). The place has to hold zeros, or sums of the microbatches before,
when the first layer's backward runs. No parameter's hook comes that early: the gradients of a forward's outputs do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")
"""The attributes by which modules of Transformer Engine and of Megatron-LM say that they add."""


def declare_main_grads(module: nn.Module) -> list[Any]:
    """Sets ``grad_added_to_main_grad = False`` on the parameters of modules that say that they add gradients, and
    returns those that lacked it. A layer of any other kind sets it on its own weights, before the model is wrapped."""
    adding = (child for child in module.modules() if any(getattr(child, name, False) is True for name in _FUSED))
    own = (param for child in adding for param in child._parameters.values() if param is not None)
    declared: list[Any] = [param for param in own if not has_main_grad(param)]
    for param in declared:
        param.grad_added_to_main_grad = False
    return declared


def withdraw_main_grads(declared: list[Any]) -> None:
    """Takes back what :func:`declare_main_grads` has set: a layer that is switched off is a plain one again."""
    for param in declared:
        del param.grad_added_to_main_grad


def no_place_for_main_grad(name: str) -> ValueError:
    """The error where gradients do not accumulate where a layer could add to them."""
    return ValueError(
        f"parameter {name!r}: its layer adds the gradient to main_grad itself, which has to be in a contiguous buffer. "
        'Use grad_buffer="contiguous" and use_contiguous_buffers=True, the defaults, or switch it off in the layer '
        "(fuse_wgrad_accumulation=False, gradient_accumulation_fusion=False)"
    )


def has_main_grad(param: Parameter) -> bool:
    """Whether a layer may add the gradient of the parameter itself."""
    return hasattr(param, "grad_added_to_main_grad")


def set_main_grad(param: Any, place: Tensor) -> None:
    """Layers add the parameter's gradient to ``place`` from now on."""
    param.main_grad = place


def remove_main_grad(param: Any, place: Tensor) -> None:
    """Nobody adds to ``place`` any more; another one stays."""
    if getattr(param, "main_grad", None) is place:
        del param.main_grad


def pop_added_flag(param: Any) -> bool:
    """Whether the layer has added a gradient since this was asked last."""
    added, param.grad_added_to_main_grad = bool(param.grad_added_to_main_grad), False
    return added
