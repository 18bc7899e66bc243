"""Checkpoints of one file, which are complete or not there, and which are mapped rather than read.

Lightning writes a checkpoint into memory first, a second copy of the whole state, and from there to a temporary file.
Here it goes straight into a file beside the target, which takes the target's name when all of it is on the disk: a
process may be killed, and a machine may lose power, at any moment.

[Note: mapped files]
A loaded tensor is a part of the mapped file, private to its process: pages are read when they are looked at, can be
dropped, and are copied when they are written to. So ranks that each cut their shard out of the optimizer state share
one copy of the file instead of reading it all. The file may be replaced or removed meanwhile, as everything here does
it; one that is overwritten in place, or removed on another machine that shares the file system, ends a process that
looks at it afterwards. Therefore strategies hand out copies (:func:`own_memory`) to whoever may keep a tensor.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..core import CheckpointError, check_replaceable, replace_path, sync_directory

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.plugins import TorchCheckpointIO as _Base
else:
    _Base = object

_ZIP_START = b"PK\x03\x04"
_LEGACY_START = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""The number with which a file of ``torch.save(..., _use_new_zipfile_serialization=False)`` begins."""


class WholeFileIO(_Base):
    """Stands in front of a package's ``TorchCheckpointIO``, to which remote paths are left."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        local = local_path(path)
        if local is None or storage_options is not None:  # options are refused by Lightning's
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save_file(checkpoint, local)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        local = local_path(path)
        if local is None or not local.exists():  # a missing file is reported by Lightning's
            return super().load_checkpoint(path, map_location, weights_only)
        loaded: dict[str, Any] = load_file(local, map_location, weights_only)
        return loaded


class WholeFilesByDefault:
    """A strategy that uses its ``_default_io`` where the user gave no ``CheckpointIO``, or one to be put around it."""

    _default_io: ClassVar[type[WholeFileIO]]
    _checkpoint_io: CheckpointIO | None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = self._default_io()
        elif hasattr(self._checkpoint_io, "_base_checkpoint_io_configured"):  # Lightning's wrappers, like the async one
            wrapper: Any = self._checkpoint_io
            wrapper.checkpoint_io = self._default_io()  # taken if there is none in it yet
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io


def save_file(state: Any, path: str | Path) -> None:
    """``torch.save`` to a local path, where afterwards the complete file is, on the disk, or what was there before.

    It is written as ``.<name>.incomplete`` in the same directory, which a process that is killed leaves behind, and
    the next save of that name overwrites. The state is not copied.

    Raises:
        OSError: if it cannot be written, with the path.
    """
    outer = sys.exception()
    target = Path(path)
    part = target.with_name(f".{target.name}.incomplete")
    try:
        check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # before the name, or a crash of the machine could leave the name and no content
        replace_path(part, target)
    except BaseException as error:
        with contextlib.suppress(OSError):  # most often since its directory is not there
            part.unlink()
        cause = _os_error(error, outer)
        if cause is None:
            raise
        where = f": {cause.filename}" if cause.filename not in (None, str(part)) else ""
        reason = f"the checkpoint was not saved ({cause.strerror}{where}), and what had its name before is as it was"
        raise OSError(cause.errno, reason, str(target)) from error
    sync_directory(target.parent)


def load_file(path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
    """``torch.load`` from a local path. The file is mapped if its format allows it; see [Note: mapped files].

    Raises:
        CheckpointError: if it is empty, cut off, or not a file of ``torch.save``.
    """
    with open(path, "rb") as file:
        is_zip = file.read(len(_ZIP_START)) == _ZIP_START
    try:
        return torch.load(path, map_location, weights_only=weights_only, mmap=is_zip)
    except Exception as error:
        problem = _problem(Path(path), error)
        if problem is None:  # it is whole; the error is about what is in it, like a class that must not be loaded
            error.add_note(f"while loading the checkpoint {path}")
            raise
        raise CheckpointError(f"{path} {problem}") from error


def own_memory(value: Any) -> Any:
    """What was loaded, with no tensor of it in a mapped file; those that share memory still do."""
    return copy.deepcopy(value)


def check_module_state(module: torch.nn.Module, state: Mapping[str, Any], strict: bool, source: str) -> None:
    """Finds out whether ``module.load_state_dict(state, strict)`` would fail, which it does half-way through.

    Only where torch's own rules hold: a module that loads in ways of its own is left alone, with all in it, and
    nothing is said where hooks may rename what is in the state, or forgive what is not.

    Raises:
        CheckpointError: naming ``source``, and every name that is missing, not wanted or of another shape.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source} is no state of a module: it is {describe_foreign(state)}")
    hooked = (child._load_state_dict_pre_hooks or child._load_state_dict_post_hooks for child in module.modules())
    if any(hooked) or _is_custom(module):
        return
    custom = tuple(f"{name}." for name, child in module.named_modules() if name and _is_custom(child))
    own = {name: tensor for name, tensor in _persistent_tensors(module).items() if not name.startswith(custom)}
    skipped = ("_extra_state",)
    saved = {name: value for name, value in state.items() if not (name.startswith(custom) or name.endswith(skipped))}
    problems = [
        f"{name!r} has shape {tuple(value.shape)} there, {tuple(own[name].shape)} in the model"
        for name, value in saved.items()
        if name in own and isinstance(value, Tensor) and not _fits(value, own[name])
    ]
    if strict:
        missing = [name for name in own if name not in saved and not name.endswith("num_batches_tracked")]
        problems += [f"{name!r} is missing there" for name in missing]  # BatchNorm's counter: as old versions saved it
        problems += [f"{name!r} is there, and not in the model" for name in saved if name not in own]
    if problems:
        raise CheckpointError(
            f"{source} holds the weights of another model, and nothing was loaded:\n  " + "\n  ".join(problems)
        )


def check_optimizer_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    names: Mapping[torch.nn.Parameter, str],
    source: str,
    elementwise: bool,
) -> None:
    """Finds out whether the optimizer would refuse the state, before one of several optimizers has taken its own.

    Args:
        optimizer: its ``param_groups`` hold the model's parameters.
        state: whole, as torch has it.
        names: of the parameters.
        source: where the state is from, for the error.
        elementwise: what has more than one number must have the shape of its parameter, as when it will be sharded.

    Raises:
        CheckpointError: if groups or shapes differ, with the group or the parameter.
    """
    what = f"{source} is of another {type(optimizer).__name__}, and no optimizer state was loaded"
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError(f"{source} is no state of an optimizer: it is {describe_foreign(state)}")
    groups, own_groups = state["param_groups"], optimizer.param_groups
    if len(groups) != len(own_groups):
        raise CheckpointError(f"{what}: it has {len(groups)} parameter group(s), the optimizer {len(own_groups)}")
    keys = {key for values in state["state"].values() for key, value in values.items() if _numel(value) > 1}
    for position, (saved, own) in enumerate(zip(groups, own_groups, strict=True)):
        params = [(param, names.get(param, "a parameter")) for param in own["params"]]
        if len(saved["params"]) != len(params):
            raise CheckpointError(
                f"{what}: group {position} has {len(saved['params'])} parameter(s) there, and {len(params)} in the "
                f"optimizer: {', '.join(name for _, name in params[:20])}{', ...' if len(params) > 20 else ''}"
            )
        for number, (param, name) in zip(saved["params"], params, strict=True) if elementwise else ():
            for key in keys & set(state["state"].get(number, ())):
                shape = tuple(state["state"][number][key].shape)
                if shape != tuple(param.shape):
                    raise CheckpointError(f"{what}: {key!r} of {name!r} has shape {shape}, not {tuple(param.shape)}")


def describe_foreign(value: Any) -> str:
    """A few words on something that was expected to be another thing."""
    if isinstance(value, Mapping):
        keys = list(value)
        return f"a {type(value).__name__} with {keys[:5]}{' and more' if len(keys) > 5 else ''}"
    return f"a {type(value).__name__}"


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 0


def _fits(saved: Tensor, own: Tensor) -> bool:
    """torch's rule: equal shapes, or a 0-dim tensor, which old versions saved with one dimension."""
    return saved.shape == own.shape or (own.dim() == 0 and saved.dim() == 1)


def _is_custom(module: torch.nn.Module) -> bool:
    """Whether it has a way of its own to load its parameters and buffers."""
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return True
    functions = (module.load_state_dict, module._load_from_state_dict)
    return any(not function.__module__.startswith("torch.nn.") for function in functions)


def _persistent_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """What torch's ``load_state_dict`` asks for, whatever the module's ``state_dict`` leaves out. Tied ones twice."""
    tensors: dict[str, Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        buffers = {
            name: value for name, value in child._buffers.items() if name not in child._non_persistent_buffers_set
        }
        for name, value in [*child._parameters.items(), *buffers.items()]:
            if value is not None:
                tensors[f"{prefix}.{name}" if prefix else name] = value
    return tensors


def local_path(path: str | Path) -> Path | None:
    """The file that fsspec would open for ``path``, or None if it is not on a local file system."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    file_system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(file_system, LocalFileSystem) else None


def _os_error(error: BaseException | None, outer: BaseException | None) -> OSError | None:
    """The reason of an error of torch.save, which tells of a failed write in words of its own. It may itself be called
    while ``outer`` is dealt with, which is no reason."""
    while error is not outer and error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _problem(path: Path, error: Exception) -> str | None:
    """What is wrong with the file as a whole, and what to do; None if it is one of torch.save, with all its parts."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(len(_ZIP_START), len(_LEGACY_START)))
    cut_off = (
        f"is cut off after {size:,} bytes: it was copied in part, or its writer was ended while it wrote in place. "
        "Resume from another checkpoint"
    )
    if size == 0:
        return "is empty: its writer was ended before it wrote. Resume from another checkpoint"
    if start.startswith(_ZIP_START):
        if not zipfile.is_zipfile(path):
            return cut_off
        with zipfile.ZipFile(path) as archive:
            if any(name.split("/")[1:] == ["data.pkl"] for name in archive.namelist()):
                return None
    elif start.startswith(_LEGACY_START[: len(start)]):
        short = isinstance(error, EOFError | IndexError | struct.error) or size < len(_LEGACY_START)
        return cut_off if short or "EOF" in str(error) or "truncated" in str(error) else None
    return "is no checkpoint: torch.save did not write it. Check the path"
