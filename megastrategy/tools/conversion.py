"""A sharded directory made into one file, and one file into a sharded directory; complete, or not there.

A file is mapped. A directory is read into host memory, as by Lightning's ``consolidate_checkpoint`` and torch's
``dcp_to_torch_save``.

[Note: names are not guessed]
A file has optimizer state by number, counted through the optimizer's groups; only the code that made the groups knows
the names. The order of the weights is no proof. Groups are often made of weight decay first and the rest after, and
where two layers have one shape nothing in the file would contradict an exchange of their moments.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .._checkpoints.directory_writer import save_directory
from .._checkpoints.files import save_file
from .._checkpoints.not_tensors import not_tensors
from ..core import CheckpointError, is_directory_checkpoint
from .checkpoint_parts import Parts, by_name, content_of_file, read_directory_parts

Names = dict[str, list[list[str]]]
"""Parameter names by optimizer, group by group."""


def default_file(directory: Path) -> Path:
    """Returns the default file of :func:`consolidate`: ``last.ckpt`` becomes ``last.consolidated.ckpt``
    beside it."""
    path = Path(os.path.abspath(directory))
    return path.with_name(f"{path.stem}.consolidated{path.suffix}")


def consolidate(directory: Path, file: Path, *, force: bool = False, trust: bool = False) -> None:
    """Writes the file that ``strategy="ddp"`` would have written.

    Raises:
        CheckpointError: if the directory is no complete checkpoint, or ``file`` is there and not to be replaced.
        OSError: if it cannot be written; what was there is as it was.
    """
    check_target(file, force)
    save_file(content_of_file(read_directory_parts(directory, trust, reads=True)), file)


def convert(parts: Parts, names: Names, directory: Path, *, force: bool = False) -> None:
    """Writes the parts of a file as a directory that every rank reads its part of.

    Args:
        parts: of a file.
        names: of the parameters of every optimizer that has any state.
        directory: to be made.
        force: replace a checkpoint that is there.

    Raises:
        CheckpointError: if names are missing or wrong, or ``directory`` is there and not to be replaced, or it
            cannot be written; what was there is as it was.
    """
    check_target(directory, force)
    state: dict[str, Any] = dict(parts.models)
    if "" in state or "" in parts.optimizers:
        what = "weights" if "" in state else "the state of an optimizer"
        raise CheckpointError(
            f"{parts.path} is nothing but {what}, and in a directory it would need a key: save a dictionary, as "
            "fabric.load() expects it, or load it by load_state_dict"
        )
    for key, optimizer in parts.optimizers.items():
        if not optimizer.get("param_groups"):
            continue  # Lightning's stand-in where a module has none
        # see [Note: names are not guessed]
        if key not in names:
            raise CheckpointError(
                f"{parts.path} has the state of {key!r} by number, and the directory needs parameter names, which only "
                "your code knows: say --names FILE. Or resume your training from the file with "
                "state_dict_type='sharded', whose next checkpoint is a directory"
            )
        state[key] = by_name(optimizer, names[key], parts.models, f"{key!r} in {parts.path}")
        if key in parts.main_params:
            state[key]["main_params"] = dict(parts.main_params[key])
    save_directory(state, parts.extra | not_tensors(parts.models), directory, None)


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
        return {key: [group["params"] for group in state["param_groups"]] for key, state in optimizers.items()}
    try:
        names: Names = json.loads(path.read_text())
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


def check_target(path: Path, force: bool) -> None:
    """Raises CheckpointError if something is at ``path`` that must stay there.

    A directory is removed only if it is a checkpoint, also with --force.
    """
    if path.is_dir() and not is_directory_checkpoint(path):
        raise CheckpointError(f"{path} is a directory, and no checkpoint: say where in it the checkpoint shall be")
    if path.exists() and not force:
        raise CheckpointError(f"{path} is already there: --force replaces it")
