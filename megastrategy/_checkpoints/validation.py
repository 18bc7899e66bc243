"""Checks that modules and optimizers would accept a state, before anything is loaded into any of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core import CheckpointError, DistributedOptimizer


def check_module_state(
    module: torch.nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    source: str,
    known_hooks: Collection[Callable[..., Any]] = (),
) -> None:
    """Raises if ``module.load_state_dict(state, strict)`` would fail, which otherwise happens half-way through.

    Only torch's own rules are checked. A child module with a ``load_state_dict`` of its own is skipped, with all in it.
    Nothing is checked if there are hooks that may rename entries or tolerate missing ones; ``known_hooks`` do neither.

    Raises:
        CheckpointError: naming ``source``, and every name that is missing, unexpected or of another shape.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source} is no state of a module: it is {describe_foreign(state)}")
    # A hook of any child may rewrite the whole state before torch reads it, and add entries that are missing now.
    hooks = [
        getattr(hook, "hook", hook)
        for child in module.modules()
        for hook in [*child._load_state_dict_pre_hooks.values(), *child._load_state_dict_post_hooks.values()]
    ]
    if any(hook not in known_hooks for hook in hooks) or _is_custom(module):
        return
    # A false alarm would stop a run that torch resumes, so entries that a child loads by itself are not checked.
    custom = tuple(f"{name}." for name, child in module.named_modules() if name and _is_custom(child))
    module_tensors = {
        name: tensor for name, tensor in _persistent_tensors(module).items() if not name.startswith(custom)
    }
    skipped = ("_extra_state",)
    saved = {name: value for name, value in state.items() if not (name.startswith(custom) or name.endswith(skipped))}
    problems = [
        f"{name!r} has shape {tuple(value.shape)} there, {tuple(module_tensors[name].shape)} in the model"
        for name, value in saved.items()
        if name in module_tensors and isinstance(value, Tensor) and not _fits(value, module_tensors[name])
    ]
    # Without ``strict`` torch ignores names, but still refuses shapes.
    if strict:
        missing = [name for name in module_tensors if name not in saved and not name.endswith("num_batches_tracked")]
        problems += [f"{name!r} is missing there" for name in missing]  # old versions lack BatchNorm's counter
        problems += [f"{name!r} is there, and not in the model" for name in saved if name not in module_tensors]
    if problems:
        raise CheckpointError(
            f"{source} holds the weights of another model, and nothing was loaded:\n  " + "\n  ".join(problems)
        )


def check_optimizer_state(
    optimizer: DistributedOptimizer,
    state: Mapping[str, Any],
    names: Mapping[torch.nn.Parameter, str],
    source: str,
) -> None:
    """Raises if the optimizer would refuse the state, before one of several optimizers has loaded its own.

    ``state`` is full, in torch's format. ``names`` of parameters and ``source``, its origin, are for the error.

    Raises:
        CheckpointError: if groups or shapes differ, with the group or the parameter.
    """
    what = f"{source} is of another {type(optimizer).__name__}, and no optimizer state was loaded"
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError(f"{source} is no state of an optimizer: it is {describe_foreign(state)}")
    if optimizer.is_of_stage:  # it has some of the file's parameters, and checks the sizes of groups itself
        return
    groups = state["param_groups"]
    own_groups = optimizer.param_groups
    # torch checks the same, but one optimizer after the other: the first would be loaded even if the second cannot be.
    if len(groups) != len(own_groups):
        raise CheckpointError(f"{what}: it has {len(groups)} parameter group(s), the optimizer {len(own_groups)}")
    # A key is element-wise if any parameter has several numbers under it. A counter (``step``) never has several, and a
    # parameter of one element does not make its moments counters.
    entries = (entry for values in state["state"].values() for entry in values.items())
    keys = {key for key, value in entries if isinstance(value, Tensor) and value.numel() > 1}
    for position, (saved, own) in enumerate(zip(groups, own_groups, strict=True)):
        params = [(param, names.get(param, "a parameter")) for param in own["params"]]
        if len(saved["params"]) != len(params):
            raise CheckpointError(
                f"{what}: group {position} has {len(saved['params'])} parameter(s) there, and {len(params)} in the "
                f"optimizer: {', '.join(name for _, name in params[:20])}{', ...' if len(params) > 20 else ''}"
            )
        # torch never compares shapes. Other optimizers fail at their next step, but a shard would be cut out of the
        # tensor at the wrong place.
        for number, (param, name) in zip(saved["params"], params, strict=True):
            if not optimizer.is_cut(param):
                continue
            for key in keys & set(state["state"].get(number, ())):
                shape = tuple(state["state"][number][key].shape)
                if shape != tuple(param.shape):
                    raise CheckpointError(f"{what}: {key!r} of {name!r} has shape {shape}, not {tuple(param.shape)}")


def describe_foreign(value: Any) -> str:
    """Describes a value of an unexpected kind in a few words."""
    if isinstance(value, Mapping):
        keys = list(value)
        return f"a {type(value).__name__} with {keys[:5]}{' and more' if len(keys) > 5 else ''}"
    return f"a {type(value).__name__}"


def _fits(saved: Tensor, own: Tensor) -> bool:
    """Follows torch's rule: equal shapes, or a 0-dim tensor, which old versions saved with one dimension."""
    return saved.shape == own.shape or (own.dim() == 0 and saved.dim() == 1)


def _is_custom(module: torch.nn.Module) -> bool:
    """Returns True if the module loads its parameters and buffers in a way of its own."""
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return True
    functions = (module.load_state_dict, module._load_from_state_dict)
    return any(not function.__module__.startswith("torch.nn.") for function in functions)


def _persistent_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that torch's ``load_state_dict`` expects; tied ones under each name."""
    tensors: dict[str, Tensor] = {}
    # Not by ``state_dict()``: a module that leaves frozen weights out of its checkpoints overrides it, and strict
    # loading expects them nevertheless.
    for prefix, child in module.named_modules(remove_duplicate=False):
        buffers = {
            name: value for name, value in child._buffers.items() if name not in child._non_persistent_buffers_set
        }
        for name, value in [*child._parameters.items(), *buffers.items()]:
            if value is not None:
                tensors[f"{prefix}.{name}" if prefix else name] = value
    return tensors
