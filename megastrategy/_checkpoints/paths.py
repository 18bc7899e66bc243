"""Replaces and removes files and directories, so that at any moment the old or the new one is complete."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

from ..core import is_directory_checkpoint

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


def reason_of(error: BaseException, outer: BaseException | None) -> BaseException:
    """Finds why a write failed: torch.save reports a full disk, and Ctrl-C, in words of its own ("unexpected pos").

    Returns the error of the system or the interrupt in the chain of causes; ``error`` if there is none. ``outer`` was
    being handled before the write, so it may be in the chain; it is no reason.
    """
    each: BaseException | None = error
    while each is not None and each is not outer:
        if isinstance(each, OSError) or not isinstance(each, Exception):
            return each
        each = each.__cause__ or each.__context__
    return error


def check_replaceable(path: Path) -> None:
    """Raises IsADirectoryError for a directory that is no checkpoint: what a user has in it is not ours to remove."""
    if path.is_dir() and not is_directory_checkpoint(path) and any(path.iterdir()):
        raise IsADirectoryError(errno.EISDIR, "it is a directory, and no checkpoint", str(path))


def replace_path(new: Path, path: Path) -> None:
    """Moves a file or directory to ``path``; what was there, a file or a checkpoint directory, goes.

    At any moment the old or the new one is complete at ``path``, where the system can exchange two names at once
    (Linux); elsewhere a directory that is replaced is missing for a moment.

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
            # A kernel or a file system without the exchange; every other error is one.
            if error.errno not in (errno.ENOSYS, errno.EINVAL):
                raise
            # Moved aside, not removed first: killed in between, a user finds the old one complete under this name.
            old = path.with_name(f".{path.name}.replaced")
            remove_path(old)
            path.rename(old)
            new.rename(path)
        remove_path(old)
    else:
        new.replace(path)


def sync_directory(directory: Path) -> None:
    """Writes the names in it to the disk, on file systems that can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    # Python has no call for it, and elsewhere than on Linux there is none.
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(other))
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def removed_name(path: Path) -> Path:
    """Returns the name under which a checkpoint is removed; what a removal that was cut off left there is removed with
    the next removal or save of that name."""
    return path.with_name(f".{path.name}.removed")


def remove_path(path: Path) -> None:
    """Removes a file, a directory, or of a symbolic link the link; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
