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
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..core import CheckpointError
from .paths import check_replaceable, replace_path, sync_directory

_ZIP_START = b"PK\x03\x04"


def save_file(state: Any, path: str | Path) -> None:
    """Saves to a local path as ``torch.save`` does. Afterwards the disk has the complete new file, or the old one.

    It is written as ``.<name>.incomplete`` in the same directory. A killed process leaves that behind, and the next
    save of that name overwrites it. The state is not copied.

    Raises:
        OSError: if it cannot be written, with the path.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.incomplete")
    try:
        with reported_by_the_system():
            check_replaceable(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_synced(state, part)
            replace_path(part, target)
    except BaseException as error:
        with contextlib.suppress(OSError):  # most often since its directory does not exist
            part.unlink()
        if not isinstance(error, OSError):
            raise
        where = f": {error.filename}" if error.filename not in (None, str(part)) else ""
        reason = f"the checkpoint was not saved ({error.strerror}{where}), and what had its name before is as it was"
        raise OSError(error.errno, reason, str(target)) from error
    sync_directory(target.parent)


@contextlib.contextmanager
def reported_by_the_system() -> Iterator[None]:
    """Raises the system's error, or the interrupt, where torch.save reports it in its own words ("unexpected pos")."""
    outer = sys.exception()
    try:
        yield
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and reason is not outer:  # which was handled before the write, and is not the reason
            if isinstance(reason, OSError) or not isinstance(reason, Exception):
                break
            reason = reason.__cause__ or reason.__context__
        if reason in (None, outer, error):
            raise
        raise reason from error


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
        start = file.read(len(_ZIP_START))
    try:
        return torch.load(path, map_location, weights_only=weights_only, mmap=start == _ZIP_START)
    except Exception as error:
        problem = _problem(Path(path), start)
        # The file is complete, and the error is about its contents, like a class that must not be loaded.
        if problem is None:
            error.add_note(f"while loading the checkpoint {path}")
            raise
        raise CheckpointError(f"{path} {problem}") from error


def unmapped_copy(value: Any) -> Any:
    """Copies loaded values, so that no tensor is in a mapped file. Tensors that share memory still share it."""
    return copy.deepcopy(value)


def _problem(path: Path, start: bytes) -> str | None:
    """Says why the file is no complete one of torch.save, and what to do; None if it is one."""
    size = path.stat().st_size
    # A machine that crashed before the content was on the disk leaves a name without content.
    if size == 0:
        return "is empty: its writer was ended before it wrote. Resume from another checkpoint"
    if start.startswith(b"\x80"):  # a pickle, as torch wrote until 2020: torch's own error says what is wrong
        return None
    if start == _ZIP_START:
        # A zip file has its directory at the end, so one that was cut off has none.
        if not zipfile.is_zipfile(path):
            return (
                f"is cut off after {size:,} bytes: it was copied in part, or its writer was ended while it wrote in "
                "place. Resume from another checkpoint"
            )
        with zipfile.ZipFile(path) as archive:
            if any(name.split("/")[1:] == ["data.pkl"] for name in archive.namelist()):
                return None
    return "is no checkpoint: torch.save did not write it. Check the path"


def trainable_weights(module: Module, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights of a file that may become main params of the module's 16-bit weights.

    Weights of frozen parameters are left out: every rank would keep them in full, without use while they are frozen.
    """
    names = [name for name, param in module.named_parameters() if param.requires_grad and param.is_floating_point()]
    return {name: state_dict[name] for name in names if isinstance(state_dict.get(name), Tensor)}
