"""Maps the optimizer's numbers to parameter names, from the user's code or from a file.

[Note: names are not guessed]
A file has optimizer state by number, counted through the optimizer's groups; only the code that made the groups knows
the names. The order of the weights is no proof. Groups are often made of weight decay first and the rest after, and
where two layers have one shape nothing in the file would contradict an exchange of their moments.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..core import CheckpointError, is_directory_checkpoint
from .checkpoint_parts import Parts, read_directory_parts

Names = dict[str, list[list[str]]]
"""Parameter names by optimizer, group by group."""


def names_in_file(parts: Parts) -> Names:
    """Returns the names that are in the file, by optimizer.

    They are there for optimizers that were made from ``named_parameters()``, since torch keeps the names in their
    groups, and for state that FSDP wrote, which is by name in files, too.
    """
    names: Names = {}
    for key, state in parts.optimizers.items():
        groups = state.get("param_groups", ())
        names_by_group = [
            list(group.get("param_names") or (param for param in group["params"] if isinstance(param, str)))
            for group in groups
        ]
        if [len(group) for group in names_by_group] == [len(group["params"]) for group in groups]:
            names[key] = names_by_group
    return names


def names_from(path: Path, trust: bool = False) -> Names:
    """Reads the names from another sharded directory of the same training, or from JSON:
    ``{optimizer: [[name, ...], ...]}``.

    Raises:
        CheckpointError: if it is neither.
    """
    if is_directory_checkpoint(path):
        optimizers = read_directory_parts(path, trust).optimizers
        names = {key: [group["params"] for group in state["param_groups"]] for key, state in optimizers.items()}
    else:
        try:
            names = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{path} is neither JSON nor a sharded directory: {error}") from error
    # the file is written by hand: a wrong form is named here, not by an error from within
    groups = list(names.values()) if isinstance(names, dict) else [None]
    if not all(
        isinstance(groups_of_optimizer, list)
        and all(isinstance(group, list) and all(isinstance(n, str) for n in group) for group in groups_of_optimizer)
        for groups_of_optimizer in groups
    ):
        raise CheckpointError(f"{path}: expected a list of groups, each a list of parameter names, by optimizer")
    return names


def names_from_module(spec: str, parts: Parts) -> Names:
    """Takes the names from the code itself.

    Args:
        spec: ``package.module:name`` of what is called and returns a LightningModule, or a module and its optimizer,
            or a module and a list or dictionary of optimizers. A class is called with the hyper-parameters in the
            checkpoint, anything else without arguments.
        parts: of the checkpoint.

    Raises:
        CheckpointError: if that fails, with the reason.
    """
    factory = _find(spec)
    # a class of Lightning's is made as ``load_from_checkpoint`` makes it
    saved = parts.extra.get("hyper_parameters", {}) if inspect.isclass(factory) else {}
    try:
        made = factory(**saved)
        module, made = made if isinstance(made, tuple) else (made, made.configure_optimizers())
    except Exception as error:
        remedy = (
            "give a function that returns the module and its optimizer" if inspect.isclass(factory) else "correct it"
        )
        raise CheckpointError(f"--module {spec} failed with {type(error).__name__}: {error}; {remedy}") from error
    # fabric's files have optimizers under the user's own keys
    if isinstance(made, Mapping) and set(made) == set(parts.optimizers):
        optimizers = dict(made)
    else:
        made_optimizers = _optimizers_in(made)
        # others are matched by their order, so there must be as many
        if len(made_optimizers) != len(parts.optimizers):
            raise CheckpointError(
                f"--module {spec} makes {len(made_optimizers)} optimizer(s), {parts.path} has {len(parts.optimizers)}"
            )
        optimizers = dict(zip(parts.optimizers, made_optimizers, strict=True))
    names = {id(param): name for name, param in module.named_parameters()}
    try:
        return {
            key: [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
            for key, optimizer in optimizers.items()
        }
    except KeyError as error:
        raise CheckpointError(f"--module {spec}: an optimizer has a parameter that the module has not") from error


def _find(spec: str) -> Callable[..., Any]:
    module_name, _, name = spec.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise CheckpointError(
            f"--module {spec}: {type(error).__name__}: {error}; expected package.module:name, importable from here"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    return factory


def _optimizers_in(made: Any) -> list[torch.optim.Optimizer]:
    """Lists the optimizers in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(made, torch.optim.Optimizer):
        return [made]
    if isinstance(made, Mapping):
        return _optimizers_in(made.get("optimizer"))
    return [optimizer for item in made for optimizer in _optimizers_in(item)] if isinstance(made, list | tuple) else []
