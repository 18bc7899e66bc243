"""Finds out whether a module or an optimizer would refuse a state, before anything is loaded into any of them."""

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
    """Raises if ``module.load_state_dict(state, strict)`` would fail, which it does half-way through.

    It looks only where torch's own rules hold. A module that loads in ways of its own is left alone, with all in it.
    Nothing is said where hooks may rename what is in the state, or forgive what is not; ``known_hooks`` do neither.

    Raises:
        CheckpointError: naming ``source``, and every name that is missing, not wanted or of another shape.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source} is no state of a module: it is {describe_foreign(state)}")
    # a hook of any child may rewrite the whole state before torch looks at it, so what is missing now may be there then
    hooks = [
        getattr(hook, "hook", hook)
        for child in module.modules()
        for hook in [*child._load_state_dict_pre_hooks.values(), *child._load_state_dict_post_hooks.values()]
    ]
    if any(hook not in known_hooks for hook in hooks) or _is_custom(module):
        return
    # a false alarm would stop a run that torch resumes, so what a child loads by itself is not judged
    custom = tuple(f"{name}." for name, child in module.named_modules() if name and _is_custom(child))
    own = {name: tensor for name, tensor in _persistent_tensors(module).items() if not name.startswith(custom)}
    skipped = ("_extra_state",)
    saved = {name: value for name, value in state.items() if not (name.startswith(custom) or name.endswith(skipped))}
    problems = [
        f"{name!r} has shape {tuple(value.shape)} there, {tuple(own[name].shape)} in the model"
        for name, value in saved.items()
        if name in own and isinstance(value, Tensor) and not _fits(value, own[name])
    ]
    # without ``strict`` torch passes over names, and still refuses shapes
    if strict:
        missing = [name for name in own if name not in saved and not name.endswith("num_batches_tracked")]
        problems += [f"{name!r} is missing there" for name in missing]  # BatchNorm's counter: as old versions saved it
        problems += [f"{name!r} is there, and not in the model" for name in saved if name not in own]
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
    """Raises if the optimizer would refuse the state, before one of several optimizers has taken its own.

    Args:
        optimizer: its ``param_groups`` hold the model's parameters.
        state: whole, as torch has it.
        names: of the parameters.
        source: where the state is from, for the error.

    Raises:
        CheckpointError: if groups or shapes differ, with the group or the parameter.
    """
    what = f"{source} is of another {type(optimizer).__name__}, and no optimizer state was loaded"
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError(f"{source} is no state of an optimizer: it is {describe_foreign(state)}")
    if optimizer.is_of_stage:  # whose parameters are some of the file's; it refuses groups of other sizes itself
        return
    groups, own_groups = state["param_groups"], optimizer.param_groups
    # torch asks the same, but of one optimizer after the other: the first would be loaded where the second does not fit
    if len(groups) != len(own_groups):
        raise CheckpointError(f"{what}: it has {len(groups)} parameter group(s), the optimizer {len(own_groups)}")
    # a key is element-wise if any parameter has several numbers under it. A counter (``step``) never has, and a
    # parameter of one element does not turn its moments into counters
    keys = {key for values in state["state"].values() for key, value in values.items() if _numel(value) > 1}
    for position, (saved, own) in enumerate(zip(groups, own_groups, strict=True)):
        params = [(param, names.get(param, "a parameter")) for param in own["params"]]
        if len(saved["params"]) != len(params):
            raise CheckpointError(
                f"{what}: group {position} has {len(saved['params'])} parameter(s) there, and {len(params)} in the "
                f"optimizer: {', '.join(name for _, name in params[:20])}{', ...' if len(params) > 20 else ''}"
            )
        # torch never compares shapes. Whole optimizers fail at their next step; a shard would be cut at a wrong place
        for number, (param, name) in zip(saved["params"], params, strict=True):
            if not optimizer.is_cut(param):
                continue
            for key in keys & set(state["state"].get(number, ())):
                shape = tuple(state["state"][number][key].shape)
                if shape != tuple(param.shape):
                    raise CheckpointError(f"{what}: {key!r} of {name!r} has shape {shape}, not {tuple(param.shape)}")


def describe_foreign(value: Any) -> str:
    """Describes in a few words something that was expected to be another thing."""
    if isinstance(value, Mapping):
        keys = list(value)
        return f"a {type(value).__name__} with {keys[:5]}{' and more' if len(keys) > 5 else ''}"
    return f"a {type(value).__name__}"


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 0


def _fits(saved: Tensor, own: Tensor) -> bool:
    """Follows torch's rule: equal shapes, or a 0-dim tensor, which old versions saved with one dimension."""
    return saved.shape == own.shape or (own.dim() == 0 and saved.dim() == 1)


def _is_custom(module: torch.nn.Module) -> bool:
    """Whether it has a way of its own to load its parameters and buffers."""
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return True
    functions = (module.load_state_dict, module._load_from_state_dict)
    return any(not function.__module__.startswith("torch.nn.") for function in functions)


def _persistent_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that torch's ``load_state_dict`` asks for, whatever the module's ``state_dict`` leaves out.
    Tied ones are there under each name."""
    tensors: dict[str, Tensor] = {}
    # not by ``state_dict()``: a module that leaves frozen weights out of its checkpoints overrides that, and strict
    # loading asks for them nevertheless
    for prefix, child in module.named_modules(remove_duplicate=False):
        buffers = {
            name: value for name, value in child._buffers.items() if name not in child._non_persistent_buffers_set
        }
        for name, value in [*child._parameters.items(), *buffers.items()]:
            if value is not None:
                tensors[f"{prefix}.{name}" if prefix else name] = value
    return tensors
