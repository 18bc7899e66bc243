"""Lets ``torch.distributed.checkpoint.state_dict`` load with ``full_state_dict=True`` into a sharded optimizer.

[Note: why a rank without state shows a tensor]
With that option ``set_optimizer_state_dict`` first looks for the device of the tensors in each rank's
``state_dict()``, and raises on a rank that has none. Here rank 0 has the state, and other ranks no entries of it. So
in this call they show one small tensor, which ``load_state_dict()`` drops. In any other call it would end in files,
where torch DDP would load it. torch announces the option to no method of an optimizer, so the stack is read:
``_load_optim_state_dict`` asks for the state only to find this device.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_DEVICE = "megastrategy: a tensor for torch's set_optimizer_state_dict to find"


def with_device(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Adds a tensor to a state that has none, if torch's helper looks for one.

    See [Note: why a rank without state shows a tensor]. On all ranks for an optimizer that keeps no tensors.
    """
    if not _is_in_torch_helper():
        return state_dict
    if any(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in tree_leaves(state_dict)):
        return state_dict
    first = next(number for group in state_dict["param_groups"] for number in group["params"])
    state = state_dict["state"]
    return {**state_dict, "state": {**state, first: {**state.get(first, {}), _DEVICE: torch.empty(1)}}}


def without_device(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Drops what :func:`with_device` has added."""
    state = state_dict.get("state", {})
    added = [key for key, values in state.items() if isinstance(values, dict) and _DEVICE in values]
    if not added:
        return state_dict
    cleaned = dict(state)
    for key in added:
        values = {name: value for name, value in state[key].items() if name != _DEVICE}
        if values:
            cleaned[key] = values
        else:
            del cleaned[key]
    return {**state_dict, "state": cleaned}


def _is_in_torch_helper() -> bool:
    return any(
        frame.f_code.co_name == "_load_optim_state_dict"
        and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        for frame, _ in traceback.walk_stack(None)
    )
