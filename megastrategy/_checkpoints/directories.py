"""Sharded checkpoints for the doors: directories in the layout of Lightning's FSDP strategies.

All ranks write ``model`` (or the user's key, in Fabric) and ``optimizer_0``, ... with torch.distributed.checkpoint, and
rank 0 writes everything else into ``meta.pt``. So Lightning's consolidation tool can make one file of it, and FSDP can
read it.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor
from torch.nn import Module

from .._faults.process_collectives import checkpoint_collectives
from ..core import (
    EXTRA_FILE,
    CheckpointError,
    Directory,
    DistributedOptimizer,
    OpenDirectory,
    RemoteDirectory,
    is_directory_checkpoint,
    names_elsewhere,
    place_at,
)
from .directory_writer import BackgroundSave, save_directory
from .files import load_file, unmapped_copy
from .foreign import describe_deepspeed
from .not_tensors import NOT_TENSORS
from .paths import remove_path, removed_name

StateDictType = Literal["full", "sharded"]
"""The form of a checkpoint: one file, as "ddp" writes it, or a directory into which every rank writes its part."""


def check_state_dict_type(value: StateDictType) -> StateDictType:
    """Returns the value. Raises ValueError unless it is a StateDictType."""
    if value not in get_args(StateDictType):
        raise ValueError(
            f"state_dict_type={value!r}: expected 'full' (one file, as \"ddp\" writes it) or 'sharded' (a directory "
            "that every rank writes its part of)"
        )
    return value


def refuse_storage_options(options: Any) -> None:
    """Raises TypeError, as Lightning's ``TorchCheckpointIO`` does: a load of the directory would lack the options."""
    if options is not None:
        raise TypeError(
            "state_dict_type='sharded' takes no storage_options: how a store is reached is read from fsspec's "
            "configuration or its environment variables (FSSPEC_S3_ENDPOINT_URL, ...), by every rank"
        )


def remove_directory(path: Directory) -> None:
    """Removes a checkpoint. It loses its name first, so that it is complete or gone also after an interruption.

    The next removal or save of that name removes the rest. Of a symbolic link only the link is removed.
    """
    if isinstance(path, RemoteDirectory):
        path.remove()
        return
    # Only leftovers of this name: other runs may save and remove in the same place at the same time.
    removed = removed_name(path)
    remove_path(removed)
    path.replace(removed)
    remove_path(removed)


def existing_directory(path: str | Path) -> Directory | None:
    """Returns the place of an existing directory, complete or not; None for a file, or if nothing exists."""
    place = place_at(path)
    return place if place.is_dir() else None


def written_by(state: Mapping[str, Any], module: Module, is_first: bool) -> dict[str, Any]:
    """Returns the part of a module's state that a rank writes.

    These are the parameters, which are equal on all ranks, and on the first data-parallel rank everything else, like
    BatchNorm's statistics, as under torch DDP.
    """
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in state.items() if is_first or name in params}


class OptimizerInDirectory(NamedTuple):
    """A placeholder for an optimizer's state that stays on the disk until the optimizer reads its part."""

    directory: OpenDirectory
    key: str


class DirectorySaver:
    """Saves directories, one at a time, optionally in the background."""

    def __init__(self) -> None:
        self._background: BackgroundSave | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies of a Trainer have a new saver, without a save in the background."""
        return type(self), ()

    def save(
        self,
        state: dict[str, Any],
        extra: dict[str, Any],
        path: Directory,
        *,
        in_background: bool = False,
        is_apart: bool = False,
    ) -> None:
        """Saves a directory. Collective. In the background it saves a copy in host memory, and training may go on.

        ``is_apart``: see :func:`save_directory`.

        Raises:
            CheckpointError: if this save failed, or the one before it in the background.
        """
        self.wait()  # so that at most one copy is in memory
        collectives = checkpoint_collectives()
        if isinstance(path, Path) and (collectives.rank == 0 or is_apart):
            with contextlib.suppress(OSError):  # the save will meet it too, and report it on all ranks
                path.parent.mkdir(parents=True, exist_ok=True)  # now: callbacks make links beside it
        if in_background:
            self._background = BackgroundSave(state, extra, path, collectives)
        else:
            save_directory(state, extra, path, collectives, is_apart=is_apart)

    def run_after_save(self, action: Callable[[], None]) -> None:
        """Runs ``action`` now, or in the next :meth:`wait` if a save in the background is not complete: for example to
        remove an older checkpoint."""
        if self._background is None:
            action()
        else:
            self._background.actions_after.append(action)

    def wait(self) -> None:
        """Returns when the save in the background is complete.

        Raises:
            CheckpointError: if it failed.
        """
        if self._background is not None:
            # Ctrl-C may interrupt this, and then the next save must wait again.
            self._background.wait()
            background = self._background
            self._background = None
            background.finish()


def load_extra(path: Directory, weights_only: bool | None) -> dict[str, Any]:
    """Reads the file that rank 0 saved beside the tensors.

    Raises:
        CheckpointError: if the directory is no complete checkpoint of Lightning's layout.
    """
    incomplete = f"{path} is no complete sharded checkpoint: a directory with .metadata and {EXTRA_FILE} is one"
    if not is_directory_checkpoint(path):
        deepspeed = describe_deepspeed(path) if isinstance(path, Path) else ""
        raise CheckpointError(f"{path} {deepspeed}" if deepspeed else incomplete)
    try:
        if isinstance(path, RemoteDirectory):
            extra = read_remote_extra(path, weights_only)
        else:
            extra = unmapped_copy(load_file(path / EXTRA_FILE, "cpu", weights_only))
    except FileNotFoundError as error:
        raise CheckpointError(incomplete) from error
    return cast(dict[str, Any], extra)


def read_remote_extra(directory: RemoteDirectory, weights_only: bool | None) -> Any:
    """Loads the object that rank 0 saved beside the tensors, as ``torch.load`` does.

    Raises:
        FileNotFoundError: if it does not exist.
    """
    content = directory.file_system().cat_file(directory.object(EXTRA_FILE))
    return torch.load(io.BytesIO(content), "cpu", weights_only=weights_only)


def load_trainer_directory(path: Directory, module: Module | None, weights_only: bool | None) -> dict[str, Any]:
    """Reads a Trainer's checkpoint: weights into host memory; the states of optimizers stay on the disk.

    Of ``module``'s tensor-parallel parameters only this rank's parts are read.

    Raises:
        CheckpointError: as :func:`load_extra`.
    """
    checkpoint = load_extra(path, weights_only)
    directory = OpenDirectory(path)
    keys = directory.keys
    # Lightning's FSDPStrategy and its ModelParallelStrategy use different keys.
    key = "model" if "model" in keys else "state_dict"
    weights = directory.read(key) if module is None else directory.read_weights(key, module, names_elsewhere(module))
    checkpoint["state_dict"] = weights | checkpoint.pop(NOT_TENSORS, {}).get("model", {})
    optimizers = [key for key in keys if key.startswith("optimizer_")]
    if optimizers or "lr_schedulers" in checkpoint:  # neither: only weights were saved
        checkpoint["optimizer_states"] = [
            OptimizerInDirectory(directory, f"optimizer_{number}") for number in range(len(optimizers))
        ]
    return checkpoint


def load_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], states: Sequence[OptimizerInDirectory], weights: dict[str, Tensor]
) -> None:
    """Loads the states that :func:`load_trainer_directory` has left on the disk.

    ``weights`` become main params where the directory has none.
    """
    read = [
        optimizer.read_sharded(directory, key)
        if isinstance(optimizer, DistributedOptimizer)
        else functools.partial(optimizer.load_state_dict, directory.read(key))
        for optimizer, (directory, key) in zip(optimizers, states, strict=False)
    ]
    for optimizer, apply in zip(optimizers, read, strict=False):
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.load_main_params(weights)
        apply()
