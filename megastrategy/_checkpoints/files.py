"""Writes and reads checkpoints of one file, which are complete or missing, and which are mapped instead of read.

Lightning writes a checkpoint into memory first, a second copy of the full state, and from there to a temporary file.
Here it is written directly into a file beside the target, which gets the target's name when all of it is on the disk: a
process may be killed, and a machine may lose power, at any moment.

[Note: mapped files]
A loaded tensor is a part of the mapped file, private to its process. Pages are read on access, can be dropped, and are
copied on write. So ranks that each cut their shard out of the optimizer state share one copy of the file instead of
each reading all of it.

The file may be replaced or removed meanwhile in the way of this package. If it is overwritten in place, or removed on
another machine that shares the file system, an access afterwards ends the process. Therefore strategies return copies
(:func:`unmapped_copy`) to code that may keep a tensor.
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
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..core import CheckpointError
from .paths import check_replaceable, reason_of, replace_path, sync_directory

_ZIP_START = b"PK\x03\x04"
_LEGACY_START = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""The pickled number at the start of files of ``torch.save(..., _use_new_zipfile_serialization=False)``."""


def save_file(state: Any, path: str | Path) -> None:
    """Saves to a local path as ``torch.save`` does. Afterwards the disk has the complete new file, or the old one.

    It is written as ``.<name>.incomplete`` in the same directory. A killed process leaves that behind, and the next
    save of that name overwrites it. The state is not copied.

    Raises:
        OSError: if it cannot be written, with the path.
    """
    outer = sys.exception()
    target = Path(path)
    part = target.with_name(f".{target.name}.incomplete")
    try:
        check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_synced(state, part)
        replace_path(part, target)
    except BaseException as error:
        with contextlib.suppress(OSError):  # most often since its directory does not exist
            part.unlink()
        cause = reason_of(error, outer)
        if not isinstance(cause, OSError):
            if cause is error:
                raise
            raise cause from error
        where = f": {cause.filename}" if cause.filename not in (None, str(part)) else ""
        reason = f"the checkpoint was not saved ({cause.strerror}{where}), and what had its name before is as it was"
        raise OSError(cause.errno, reason, str(target)) from error
    sync_directory(target.parent)


def write_synced(state: Any, path: Path) -> None:
    """Saves as ``torch.save`` does, and waits for the disk: after a power cut a new name could be without data."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load_file(path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
    """Loads from a local path as ``torch.load`` does, mapped if the format allows it; see [Note: mapped files].

    Raises:
        CheckpointError: if it is empty, cut off, or not a file of ``torch.save``.
    """
    with open(path, "rb") as file:
        is_zip = file.read(len(_ZIP_START)) == _ZIP_START
    try:
        return torch.load(path, map_location, weights_only=weights_only, mmap=is_zip)
    except Exception as error:
        problem = _problem(Path(path), error)
        # The file is complete, and the error is about its contents, like a class that must not be loaded.
        if problem is None:
            error.add_note(f"while loading the checkpoint {path}")
            raise
        raise CheckpointError(f"{path} {problem}") from error


def unmapped_copy(value: Any) -> Any:
    """Copies loaded values, so that no tensor is in a mapped file. Tensors that share memory still share it."""
    return copy.deepcopy(value)


def local_path(path: str | Path) -> Path | None:
    """Returns the file that fsspec would open for ``path``, or None if it is not on a local file system."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    file_system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(file_system, LocalFileSystem) else None


def _problem(path: Path, error: Exception) -> str | None:
    """Says why the file is no complete one of torch.save, and what to do; None if it is one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(len(_ZIP_START), len(_LEGACY_START)))
    cut_off = (
        f"is cut off after {size:,} bytes: it was copied in part, or its writer was ended while it wrote in place. "
        "Resume from another checkpoint"
    )
    # A machine that crashed before the content was on the disk leaves a name without content.
    if size == 0:
        return "is empty: its writer was ended before it wrote. Resume from another checkpoint"
    if start.startswith(_ZIP_START):
        # A zip file has its directory at the end, so one that was cut off has none.
        if not zipfile.is_zipfile(path):
            return cut_off
        with zipfile.ZipFile(path) as archive:
            if any(name.split("/")[1:] == ["data.pkl"] for name in archive.namelist()):
                return None
    # This format has no directory: only the error of reading distinguishes a cut from an object that must not be
    # loaded. A file shorter than the mark matches a part of it.
    elif start.startswith(_LEGACY_START[: len(start)]):
        short = isinstance(error, EOFError | IndexError | struct.error) or size < len(_LEGACY_START)
        return cut_off if short or "EOF" in str(error) or "truncated" in str(error) else None
    return "is no checkpoint: torch.save did not write it. Check the path"


def trainable_weights(module: Module, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights of a file that may become main params of the module's 16-bit weights.

    Weights of frozen parameters are left out: every rank would keep them in full, without use while they are frozen.
    """
    names = [name for name, param in module.named_parameters() if param.requires_grad and param.is_floating_point()]
    return {name: state_dict[name] for name in names if isinstance(state_dict.get(name), Tensor)}
