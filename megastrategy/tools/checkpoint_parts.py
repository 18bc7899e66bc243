"""The parts of a checkpoint: a file and a directory have the same parts, and either can be made from them."""

from __future__ import annotations

import dataclasses
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .._checkpoints.files import load_file
from .._checkpoints.not_tensors import MAIN_PARAMS_KEY, NOT_TENSORS
from ..core import EXTRA_FILE, CheckpointError
from .trusting import open_checked, refusal

if TYPE_CHECKING:  # importing it takes half a second
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_TRAINER_MARK = "pytorch-lightning_version"


@dataclasses.dataclass
class Parts:
    """Holds the contents of a checkpoint, under their keys in a directory.

    Attributes:
        path: it is from.
        kind: of the checkpoint.
        writer: "Trainer", or "other": Fabric's files and plain torch's are the same.
        models: the weights, by key: "model" of a Trainer; "" if the file is nothing but weights.
        optimizers: torch's state_dict by key ("optimizer_0", ... of a Trainer). Its ``params`` and ``state`` have
            numbers in a file, and parameter names in a directory.
        main_params: for some optimizers, the fp32 values of 16-bit weights by parameter name.
        extra: everything else.
    """

    path: Path
    kind: Literal["file", "directory"]
    writer: Literal["Trainer", "other"]
    models: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    main_params: dict[str, Mapping[str, Tensor]] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


# --- files -----------------------------------------------------------------------------------------------------------


def read_file(path: Path, trust: bool = False) -> Parts:
    """Reads the parts of a file, with mapped tensors: their data is read when it is used.

    Raises:
        CheckpointError: if it is none, or if ``trust`` is needed to load it.
    """
    content = read_object(path, trust)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dictionary: it is no checkpoint")
    # ``torch.save`` of a bare ``state_dict()`` looks like a checkpoint whose keys are the names
    if _is_module_state(content):
        return Parts(path, "file", "other", models={"": content})
    if _is_optimizer_state(content):
        return Parts(path, "file", "other", optimizers={"": dict(content)})
    parts = _parts_of(path, {str(key): value for key, value in content.items()})
    for key, state in parts.optimizers.items():
        if state != {} and not _is_whole_optimizer_state(state):  # of a module without optimizers it is empty
            raise CheckpointError(f"{path}: {key} is no state of an optimizer, of parameter groups and their state")
    return parts


def _parts_of(path: Path, extra: dict[str, Any]) -> Parts:
    states = extra.get("optimizer_states", [])
    if not isinstance(states, list):
        what = type(states).__name__
        raise CheckpointError(
            f"{path}: 'optimizer_states' is a {what}, and a Trainer's file has a list of states there"
        )
    if _TRAINER_MARK not in extra:
        parts = Parts(path, "file", "other", main_params=extra.pop(MAIN_PARAMS_KEY, {}))
        _sort_out(parts, extra)
        return parts
    extra.pop("optimizer_states", None)
    weights = extra.pop("state_dict", {})
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{path}: a Trainer's file has a dictionary of weights")
    parts = Parts(path, "file", "Trainer", models={"model": weights}, extra=extra)
    parts.optimizers = {f"optimizer_{number}": state for number, state in enumerate(states)}
    main_params = enumerate(extra.pop(MAIN_PARAMS_KEY, []))
    parts.main_params = {f"optimizer_{number}": params for number, params in main_params if params}
    return parts


def _is_whole_optimizer_state(value: Any) -> bool:
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    return (
        isinstance(groups, list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
        and isinstance(value.get("state"), Mapping)
        and all(isinstance(values, Mapping) for values in value["state"].values())
    )


def content_of_file(parts: Parts) -> dict[str, Any]:
    """Returns the object that ``strategy="ddp"`` would pass to ``torch.save``: optimizer state by number."""
    numbered = {key: _by_number(state, f"{key!r} in {parts.path}") for key, state in parts.optimizers.items()}
    if parts.writer == "other":
        if set(parts.models) == {""}:
            return OrderedDict(parts.models[""])
        models = {key: OrderedDict(model) for key, model in parts.models.items()}
        main_params = {MAIN_PARAMS_KEY: parts.main_params} if parts.main_params else {}
        return {**models, **numbered, **parts.extra, **main_params}
    keys = [f"optimizer_{number}" for number in range(len(numbered))]
    # a list has no holes: what follows one would be loaded into the optimizer before
    missing = set(keys) - set(numbered)
    if missing:
        raise CheckpointError(f"{parts.path} has {len(keys)} optimizers, but no {sorted(missing)[0]!r}")
    content = {**parts.extra, "state_dict": OrderedDict(parts.models.get("model", {}))}
    if keys or "lr_schedulers" in parts.extra:  # which a Trainer saves with the optimizers' states, or not at all
        content["optimizer_states"] = [numbered[key] for key in keys]
    if parts.main_params:
        content[MAIN_PARAMS_KEY] = [dict(parts.main_params.get(key, {})) for key in keys]
    return content


def read_object(path: Path, trust: bool) -> Any:
    """Loads the object that torch saved in a file, with mapped tensors. Raises as :func:`read_file`."""
    try:
        return load_file(path, weights_only=not trust)
    except (CheckpointError, OSError):
        raise
    except pickle.UnpicklingError as error:
        raise refusal(path, error, trust) from error
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {reason}") from error


# --- directories -----------------------------------------------------------------------------------------------------


def read_directory_parts(path: Path, trust: bool = False, *, reads: bool = False) -> Parts:
    """Reads the parts of a directory.

    Args:
        path: of the directory.
        trust: for values that are not tensors, and for the ``.metadata``.
        reads: whether tensors are read. Otherwise they are on torch's "meta" device.

    Raises:
        CheckpointError: if it is no complete directory of torch.distributed.checkpoint, or needs ``trust``.
    """
    directory = open_checked(path, trust)
    extra_file = path / EXTRA_FILE
    extra = dict(read_object(extra_file, trust)) if extra_file.is_file() else {}
    try:
        content = directory.read(None, None if reads else lambda _, saved: _on_meta(saved))
    except CheckpointError as error:
        causes = [cause for cause, _ in getattr(error.__cause__, "failures", {}).values()]
        raise next((cause for cause in causes if isinstance(cause, CheckpointError)), error) from error
    for key, values in extra.pop(NOT_TENSORS, {}).items():
        content[key].update(values)
    parts = Parts(path, "directory", "Trainer" if _TRAINER_MARK in extra else "other", extra=extra)
    # a bare ``state_dict()``, saved by dcp.save without a key
    if _is_module_state(content):
        parts.models[""] = content
    else:
        _sort_out(parts, content)
    # the name that Lightning's ModelParallelStrategy has for it
    if parts.writer == "Trainer" and "model" not in parts.models and "state_dict" in parts.models:
        parts.models["model"] = parts.models.pop("state_dict")
    for key, optimizer in parts.optimizers.items():
        optimizer.setdefault("state", {})  # an empty dictionary leaves no trace in the format
        main_params = optimizer.pop("main_params", None)
        if main_params:
            parts.main_params[key] = main_params
    return parts


def _on_meta(saved: TensorStorageMetadata) -> Tensor:
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")


# --- kinds of state --------------------------------------------------------------------------------------------------


def _sort_out(parts: Parts, found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        if _is_optimizer_state(value):
            parts.optimizers[key] = dict(value)
        elif _is_module_state(value):
            parts.models[key] = value
        else:
            parts.extra[key] = value


def _is_optimizer_state(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("param_groups"), list)


def _is_module_state(value: Any) -> bool:
    """Returns whether it has tensors by name; a module may add any value as ``_extra_state``."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    tensors = [isinstance(item, Tensor) for key, item in value.items() if not key.endswith("_extra_state")]
    return bool(tensors) and all(tensors)


# --- numbers and names -----------------------------------------------------------------------------------------------


def _by_number(optimizer: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Turns state by parameter name into torch's: by number, counted through the groups."""
    numbers: dict[str, int] = {}
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            # a parameter in two groups has one number, as torch counts it
            numbers.setdefault(str(name), len(numbers))
    unknown = [name for name in optimizer["state"] if name not in numbers]
    if unknown:
        raise CheckpointError(f"{source} has state of {unknown[0]!r}, which is in none of its parameter groups")
    state = {numbers[name]: values for name, values in optimizer["state"].items()}
    groups = [
        {**group, "params": [numbers[str(name)] for name in group["params"]]} for group in optimizer["param_groups"]
    ]
    return {**optimizer, "state": dict(sorted(state.items())), "param_groups": groups}


def by_name(
    optimizer: Mapping[str, Any], names: Sequence[Sequence[str]], models: Mapping[str, Mapping[str, Any]], source: str
) -> dict[str, Any]:
    """Turns state by number, as torch has it, into state by parameter name.

    Args:
        optimizer: torch's state_dict.
        names: of the parameters, group by group.
        models: the weights; one of these must contain every name.
        source: where the state is from, for errors.

    Raises:
        CheckpointError: if groups have other sizes, or a name is not among the weights. Names in another order are
            refused by the optimizer that reads the directory, where shapes differ.
    """
    groups = optimizer["param_groups"]
    lengths = [len(group) for group in names]
    own_lengths = [len(group["params"]) for group in groups]
    if lengths != own_lengths:
        raise CheckpointError(f"{source} has groups of {own_lengths} parameters, the names are groups of {lengths}")
    name_of = {
        number: name
        for group, members in zip(groups, names, strict=True)
        for number, name in zip(group["params"], members, strict=True)
    }
    weights = {name: value for model in models.values() for name, value in model.items()}
    # one of the two states would be lost under the other's name
    if len(set(name_of.values())) < len(name_of):
        raise CheckpointError(f"{source}: a name is given to two parameters")
    absent = [(number, name) for number, name in name_of.items() if name not in weights]
    if absent:
        number, name = absent[0]
        raise CheckpointError(f"{source}: its parameter {number} cannot be {name!r}, which is not among the weights")
    return {
        **optimizer,
        "state": {name_of[number]: values for number, values in optimizer["state"].items()},
        "param_groups": [{**group, "params": list(members)} for group, members in zip(groups, names, strict=True)],
    }
