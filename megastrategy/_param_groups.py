"""Groups of parameters that optimizers take, by rules that many trainings share."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import Parameter


def no_decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: matrices and larger tensors decay; vectors, scalars and biases do not.

    Megatron-LM's rule: a parameter decays unless it has at most one dimension (gains of norms, biases) or its name ends
    in ``bias``. A tied parameter comes once, by its first name. Frozen ones are in the groups too, as in
    ``module.parameters()``: an optimizer skips parameters without a gradient, and trains them once they are unfrozen.

    Args:
        module: before or after it is wrapped.
        weight_decay: of the first group. The second has 0.

    Returns:
        One group or two, each with ``params`` in the order of ``module.parameters()`` and ``weight_decay``; a group
        that would be empty is left out.
    """
    decayed = list[Parameter]()
    others = list[Parameter]()
    for name, param in module.named_parameters():
        is_bias = name.rpartition(".")[2] == "bias"
        (others if is_bias or param.ndim < 2 else decayed).append(param)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
