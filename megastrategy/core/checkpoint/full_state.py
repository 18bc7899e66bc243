"""Loads torch's own full-shaped format of an optimizer's state into shards; ``shards.gathered_state`` makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import CheckpointError
from ..optimizer import ShardSet, without_state_hooks
from ..shards import copied, cut_value, per_element_keys


def load_full_state(shard_set: ShardSet, state_dict: Mapping[str, Any]) -> None:
    """Cuts a full state into this rank's shards and loads these.

    Raises:
        CheckpointError: if groups or shapes do not fit, before anything is changed.
    """
    # As torch checks it, but before anything is cut: shards are loaded by places in the groups.
    optimizer = shard_set.inner
    shards = shard_set.shards
    groups = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        raise CheckpointError(
            f"the state has parameter groups of {[len(group['params']) for group in groups]} parameters, the "
            f"optimizer of {[len(group['params']) for group in optimizer.param_groups]}: build the optimizer as it "
            "was when the state was saved"
        )
    own_numbers = {number for group in groups for number in group["params"]}
    others = {key: value for key, value in state_dict["state"].items() if key not in own_numbers}
    per_element: set[str] = set()
    if any(shard.is_cut for shard in shards.values()):
        of_params = {key: state_dict["state"][key] for key in state_dict["state"].keys() - others}
        per_element = per_element_keys(of_params, shard_set.states.element_names)
    params_by_id = shard_set.sharded_by_id
    numbers = {
        id(param): number
        for saved, own in zip(groups, optimizer.param_groups, strict=True)
        for number, param in zip(saved["params"], own["params"], strict=True)
    }

    def values_of(param: Parameter) -> dict[str, Any]:
        values = state_dict["state"].get(numbers[id(param)], {})
        index = params_by_id.get(id(param))
        if index is None:
            return {key: copied(value) for key, value in values.items()}
        spec = shard_set.layout.params[index]
        shard = shards[index]
        return {key: cut_value(value, spec, shard, key, per_element) for key, value in values.items()}

    load_state(shard_set, groups, values_of, others)


def load_state(
    shard_set: ShardSet,
    groups: Sequence[Mapping[str, Any]],
    values_of: Callable[[Parameter], dict[str, Any]],
    others: Mapping[Any, Any] | None = None,
) -> None:
    """Loads the state of this rank's stepped tensors with the optimizer's own ``load_state_dict``.

    ``values_of`` returns the state of a parameter, cut to this rank's shard; it is called only for those that have one
    here. ``others`` is state of no parameter.
    """
    optimizer = shard_set.inner
    shards = shard_set.shards
    params_by_id = shard_set.sharded_by_id if shard_set.has_shards else {}
    shard_set.states.split(replace=True)
    shard_set.was_loaded = True
    state: dict[int, dict[str, Any]] = {}
    on_host: dict[int, dict[str, Tensor]] = {}
    own_groups = []
    count = 0
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        first = count
        for param in group["params"]:
            index = params_by_id.get(id(param))
            if index is None or index in shards:  # else all of it is another rank's
                values = values_of(param)
                if values:
                    names = shard_set.states.names_kept_on_host(shards[index], values) if index is not None else ()
                    on_host[count] = {name: values[name] for name in names}
                    # Of no elements: torch chooses the dtype, and moves nothing.
                    state[count] = values | {name: value.new_empty(0) for name, value in on_host[count].items()}
                count += 1
        own_groups.append({**saved, "params": list(range(first, count))})
    with shard_set.groups_of_shards(), without_state_hooks(optimizer):
        optimizer.load_state_dict({"state": {**state, **(others or {})}, "param_groups": own_groups})
        # torch casts state to the parameter's dtype, as under DDP. The state of a frozen 16-bit weight keeps the dtype
        # of its main param, to which it comes when the parameter is unfrozen.
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        for number, values in state.items():
            is_narrow = stepped[number].dtype in (torch.bfloat16, torch.float16)
            for key, value in values.items() if is_narrow else ():
                if key in (kept := optimizer.state[stepped[number]]):
                    kept[key] = _in_saved_dtype(kept[key], value)
        for number, values in on_host.items():
            kept = optimizer.state[stepped[number]]
            kept.update((name, value.to(kept[name].dtype)) for name, value in values.items())
    shard_set.states.keep_loaded(shards.values())


def _in_saved_dtype(kept: Any, saved: Any) -> Any:
    """The value that an optimizer has loaded; where it has cast it, the saved one."""
    if isinstance(kept, Tensor) and isinstance(saved, Tensor):
        return kept if kept.dtype == saved.dtype else saved.to(kept.device)
    if isinstance(kept, dict) and isinstance(saved, dict) and kept.keys() == saved.keys():
        return {key: _in_saved_dtype(value, saved[key]) for key, value in kept.items()}
    if type(kept) is type(saved) and type(kept) in (list, tuple) and len(kept) == len(saved):
        return type(kept)(map(_in_saved_dtype, kept, saved))
    return kept
