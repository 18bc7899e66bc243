"""Modules that were made on meta get memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import Parameter


def materialise(module: nn.Module, device: torch.device) -> list[str]:
    """Gives what is on meta memory on ``device``, and the values that ``reset_parameters`` of its modules chooses.

    Returns:
        The modules, by name and class, that have no ``reset_parameters``, so that their values are anything.
    """
    without = []
    for name, child in replace_meta(module, lambda tensor: torch.empty_like(tensor, device=device)).items():
        if callable(reset := getattr(child, "reset_parameters", None)):
            reset()
        else:
            without.append(f"{name or 'the module'} ({type(child).__name__})")
    return without


def replace_meta(module: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[str, nn.Module]:
    """Puts what ``make`` returns in the place of each parameter and buffer on meta.

    What has memory already keeps it, and its values. A parameter of several modules stays one. torch's ``to_empty``
    would leave neither as it was.

    Returns:
        The modules that had some themselves, by name.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with what it was made of, whose id is its own that long

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new, is_param = make(tensor), isinstance(tensor, Parameter)
            made[id(tensor)] = tensor, Parameter(new, tensor.requires_grad) if is_param else new
        return made[id(tensor)][1]

    had_some = {}
    for name, child in module.named_modules():
        owners = [own for own in (child._parameters, child._buffers) if any(map(_is_on_meta, own.values()))]
        for own in owners:
            own.update({key: real(tensor) for key, tensor in own.items() if tensor is not None and tensor.is_meta})
        if owners:
            had_some[name] = child
    return had_some


def _is_on_meta(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta
