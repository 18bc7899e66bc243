"""Replaces and removes files and directories, so that at any moment the old or the new one is complete."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

from ..core import is_directory_checkpoint

# of Linux's renameat2
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_replaceable(path: Path) -> None:
    """Raises IsADirectoryError for a directory that is no checkpoint: a user's files must not be removed."""
    if path.is_dir() and not is_directory_checkpoint(path) and any(path.iterdir()):
        raise IsADirectoryError(errno.EISDIR, "it is a directory, and no checkpoint", str(path))


def replace_path(new: Path, path: Path) -> None:
    """Moves a file or directory to ``path``, and removes an older file or checkpoint directory.

    Where the system can exchange two names atomically (Linux), the old or the new one is complete at ``path`` at any
    moment. On other systems a directory that is replaced is missing for a moment.

    Raises:
        IsADirectoryError: as :func:`check_replaceable`.
    """
    check_replaceable(path)
    # rename() replaces a file by a file; a directory only if it is empty, and never across the two kinds. A symbolic
    # link is exchanged itself, not its target.
    if path.is_dir() or (os.path.lexists(path) and new.is_dir()):
        try:
            _exchange(new, path)
            old = new
        except OSError as error:
            # A kernel or a file system without the exchange; other errors are raised.
            if error.errno not in (errno.ENOSYS, errno.EINVAL):
                raise
            # Renamed, not removed first: if the process is killed in between, the old one is complete under this name.
            old = path.with_name(f".{path.name}.replaced")
            remove_path(old)
            path.rename(old)
            new.rename(path)
        remove_path(old)
    else:
        new.replace(path)


def sync_directory(directory: Path) -> None:
    """Writes the directory's names to the disk, on file systems that can do that."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    # Python has no call for it, and only Linux has one.
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(other))
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def removed_name(path: Path) -> Path:
    """Returns the name that a checkpoint gets before it is removed.

    The next removal or save of ``path`` removes leftovers of an interrupted one.
    """
    return path.with_name(f".{path.name}.removed")


def remove_path(path: Path) -> None:
    """Removes a file, a directory or a symbolic link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
