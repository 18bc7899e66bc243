"""Cuts a shard's state from that of its full parameter, and reads state as the optimizer's ``state_dict`` has it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import SIXTEEN_BIT_DTYPES, BufferLayout, ParamSpec
from .flat_shard import FlatShard
from .param_shard import ParamShard

MAIN_PARAM = "(main param)"
"""The name of a parameter's fp32 main param, beside the names of its state."""


def load_main_params(main_params: Mapping[str, Tensor], shards: Mapping[int, ParamShard], layout: BufferLayout) -> None:
    """Loads this rank's part of saved main params. Main params without an entry stay as they are.

    Raises:
        CheckpointError: if a shape does not fit, before anything is changed.
    """
    for index, spec in enumerate(layout.params):  # also for shards of other ranks, so that all ranks raise
        if layout.has_separate_main(index) and spec.name in main_params:
            _check_shape(main_params[spec.name], "main_param", spec.name, spec.shape)
    parts: list[tuple[ParamShard, Tensor]] = []
    for index, shard in shards.items():
        spec = layout.params[index]
        if layout.has_separate_main(index) and spec.name in main_params:
            parts.append((shard, cut_value(main_params[spec.name], spec, shard, "main_param", {"main_param"})))
    for shard, saved in parts:  # all of them fit, or one has raised above
        shard.main.copy_(saved)


def pending_main_params(main_params: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies the saved main params of ``params``, parameters that have no shards yet.

    Raises:
        CheckpointError: if a shape does not fit.
    """
    to_come = {}
    for name, value in main_params.items():
        param = params.get(name)
        if param is not None and param.dtype in SIXTEEN_BIT_DTYPES:
            _check_shape(value, "main_param", name, tuple(param.shape))
            to_come[name] = value.clone()
    return to_come


def per_element_keys(state: Mapping[int, Mapping[str, Any]], known: set[str] | None) -> set[str]:
    """Returns the names of element-wise state. ``known``: the names that trial steps have found; None without trials.

    Only trials can distinguish the element-wise state of a one-element parameter from a counter.
    """
    tensors = [(key, value) for values in state.values() for key, value in values.items() if isinstance(value, Tensor)]
    if known is None:
        # No tensor has two elements: all except torch's own counter is taken for element-wise.
        known = {key for key, _ in tensors} - {"step"} if all(value.numel() <= 1 for _, value in tensors) else set()
    return known | {key for key, value in tensors if value.numel() > 1}


def shard_state(values: dict[str, Any], spec: ParamSpec, shard: ParamShard, known: set[str] | None) -> dict[str, Any]:
    """Converts the state of a parameter to that of its shard.

    State in the dtype of a 16-bit weight becomes fp32, as the first step of an fp32 main param would have created it: a
    sum of ones stops at 256 in bf16. State in another dtype keeps it. Nothing is copied where nothing is cut.

    ``known``: as for :func:`per_element_keys`.
    """
    if shard.is_cut:
        per_element = per_element_keys({0: values}, known)
        values = {key: cut_value(value, spec, shard, key, per_element) for key, value in values.items()}
    if not spec.has_main_param:
        return values
    return {
        key: value.to(shard.main.dtype) if isinstance(value, Tensor) and value.dtype == spec.dtype else value
        for key, value in values.items()
    }


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


def cut_value(value: Any, spec: ParamSpec, shard: ParamShard, key: str, per_element: set[str]) -> Any:
    """Returns the shard's part of one value of a parameter's state, in memory of its own.

    Raises:
        CheckpointError: if its shape is not the parameter's.
    """
    if not isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, FlatShard):
        return value.local  # read for this shard
    if not shard.is_cut:  # of any shape; copied, since torch's load_state_dict would go on using the caller's tensor
        has_shape = type(value) is Tensor and tuple(value.shape) == spec.shape
        return _in_strides_of(spec, value) if has_shape else _cloned(value)
    if key not in per_element:  # a counter or a flag, which every owner has
        return value.clone()
    _check_shape(value, key, spec.name, spec.shape)
    dense = value if value.stride() == spec.stride else _in_strides_of(spec, value)
    return dense.as_strided((spec.numel,), (1,))[shard.start : shard.end].clone()


def _in_strides_of(spec: ParamSpec, value: Tensor) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)


def _check_shape(value: Tensor, key: str, name: str, shape: tuple[int, ...]) -> None:
    own = value.part_shape if isinstance(value, FlatShard) else tuple(value.shape)
    if own != shape:
        raise CheckpointError(
            f"state {key!r} of parameter {name!r} has shape {own}, the parameter {shape}: this state is "
            "of another model"
        )


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
