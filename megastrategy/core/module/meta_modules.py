"""Allocates memory for modules on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import Parameter


def materialise(module: nn.Module, device: torch.device) -> list[str]:
    """Allocates parameters and buffers on meta on ``device``, and calls ``reset_parameters`` of their modules.

    Returns the names and classes of modules without ``reset_parameters``, whose values are not initialised.
    """
    without = []
    for name, child in replace_meta(module, lambda tensor: torch.empty_like(tensor, device=device)).items():
        if callable(reset := getattr(child, "reset_parameters", None)):
            reset()
        else:
            without.append(f"{name or 'the module'} ({type(child).__name__})")
    return without


def replace_meta(module: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[str, nn.Module]:
    """Replaces each parameter and buffer on meta by the tensor that ``make`` returns for it.

    Other tensors keep their memory and values, and a parameter of several modules stays one. torch's ``to_empty`` keeps
    neither. Returns the modules with replaced tensors of their own, by name.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with the replaced tensor, which keeps the id unique

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = make(tensor)
            is_param = isinstance(tensor, Parameter)
            made[id(tensor)] = tensor, Parameter(new, tensor.requires_grad) if is_param else new
        return made[id(tensor)][1]

    had_some = {}
    for name, child in module.named_modules():
        for own in (child._parameters, child._buffers):
            on_meta = {key: tensor for key, tensor in own.items() if tensor is not None and tensor.is_meta}
            if on_meta:
                own.update({key: real(tensor) for key, tensor in on_meta.items()})
                had_some[name] = child
    return had_some
