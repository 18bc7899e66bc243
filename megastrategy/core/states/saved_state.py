"""An optimizer's state as its ``state_dict`` has it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .host_copies import to_host

STATE = "state_dict()"
MAIN_PARAMS = "main_params()"
"""The two contents of a checkpoint, by the call that returns them."""


def per_element_keys(state: Mapping[int, Mapping[str, Any]], known: set[str] | None) -> set[str]:
    """Returns the names of element-wise state. ``known``: the names of flat groups' state; None if they are not known.

    Only a test of the optimizer can distinguish the element-wise state of a one-element parameter from a counter.
    """
    tensors = [(key, value) for values in state.values() for key, value in values.items() if isinstance(value, Tensor)]
    if known is None:
        # No tensor has two elements: all except torch's own counter is taken for element-wise.
        known = {key for key, _ in tensors} - {"step"} if all(value.numel() <= 1 for _, value in tensors) else set()
    return known | {key for key, value in tensors if value.numel() > 1}


def _cloned(value: Any) -> Any:
    """Copies a tensor; a subclass by the tensors that it consists of, since it may not implement ``clone``."""
    if not hasattr(value, "__tensor_flatten__"):
        return value.clone()
    names, context = value.__tensor_flatten__()
    inner = {name: _cloned(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def copied(value: Any) -> Any:
    """Copies a value with its contents: a step changes tensors in a list in place."""
    return _cloned(value) if isinstance(value, Tensor) else copy.deepcopy(value)


def as_saved(optimizer: torch.optim.Optimizer, owned: Mapping[int, Tensor]) -> dict[int, Mapping[str, Any]]:
    """Returns the state of tensors, by parameter, as the optimizer's own ``state_dict`` has it.

    It may differ from the state that the optimizer keeps: bitsandbytes wraps quantised tensors. Tensors without state
    are left out. Nothing is copied, and the optimizer is not changed, whatever is in its groups.
    """
    owned = {index: tensor for index, tensor in owned.items() if tensor in optimizer.state}
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {index: optimizer.state[tensor] for index, tensor in owned.items()}
    states = {tensor: optimizer.state[tensor] for tensor in owned.values()}
    saved = _own_state_dict(optimizer, states, [{**optimizer.param_groups[0], "params": list(owned.values())}])
    return {index: saved["state"][number] for number, index in enumerate(owned)}


def groups_as_saved(optimizer: torch.optim.Optimizer, names: Mapping[int, int | str]) -> list[dict[str, Any]]:
    """Returns the groups as the optimizer's own ``state_dict`` has them, with ``names`` (by ``id``) for parameters.

    They may differ from the groups that the optimizer keeps: Dion's learning rates are tensors, and numbers in a file.
    """
    groups = saved = optimizer.param_groups
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        saved = _own_state_dict(optimizer, {}, [{**group, "params": []} for group in groups])["param_groups"]
    return [
        {
            **{key: value for key, value in options.items() if key != "params"},
            "params": [names[id(param)] for param in group["params"]],
        }
        for group, options in zip(groups, saved, strict=True)
    ]


def _own_state_dict(
    optimizer: torch.optim.Optimizer, state: Mapping[Tensor, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Calls the class's ``state_dict`` on this state and these groups, without hooks, which would refuse the call."""
    one = object.__new__(type(optimizer))
    one.__dict__.update(optimizer.__dict__)
    one.__dict__.update({name: OrderedDict() for name in optimizer.__dict__ if name.endswith("_hooks")})
    one.state = defaultdict(dict, state)
    one.param_groups = groups
    return one.state_dict()


def number_params(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Returns torch's numbers of parameters by ``id``: counted through the groups, the last place within a group."""
    numbers: dict[int, int] = {}
    start = 0
    for group in optimizer.param_groups:
        places = {id(param): place for place, param in enumerate(group["params"], start)}
        numbers = places | numbers
        start += len(group["params"])
    return numbers


def state_by_number(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> dict[int, dict[str, Any]]:
    """Returns the state of parameters that every rank steps by itself, in host memory.

    A parameter that was not stepped yet gets an empty entry, which differs from a parameter without an entry.
    """
    numbers = number_params(optimizer)
    of_params = {numbers[id(param)]: param for param in params}
    kept = as_saved(optimizer, {number: param for number, param in of_params.items() if optimizer.state.get(param)})
    return {number: to_host(dict(kept.get(number, {}))) for number in of_params}
