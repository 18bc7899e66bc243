"""Describes a path without a checkpoint that this package reads, and says what to do with it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .._checkpoints.foreign import describe_deepspeed
from ..core import CheckpointError

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_GIT_LFS = b"version https://git-lfs.github.com/spec/"


def check_readable(path: Path) -> None:
    """Raises CheckpointError for a path that is neither a readable file nor a folder, before anything waits for it."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            os.scandir(path).close()
        elif stat.S_ISREG(mode):
            path.open("rb").close()
    except FileNotFoundError as error:
        what = f"is a link to {path.readlink()}, which is not there" if path.is_symlink() else "is not there"
        raise CheckpointError(f"{path} {what}: check the path") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise CheckpointError(f"{path} is {kind}, not a file or folder: check the path")


def describe_folder(path: Path) -> str:
    """Describes a folder without checkpoints of this package's kinds; empty if its kind is unknown."""
    children = {child.name for child in path.iterdir()}
    if not children:
        return "is an empty folder: check the path"
    deepspeed = describe_deepspeed(path)
    if deepspeed:
        return deepspeed
    if "latest_checkpointed_iteration.txt" in children or any(path.glob("mp_rank_*/model_optim_rng.pt")):
        return (
            "is a checkpoint of Megatron-LM: its own tools/checkpoint/convert.py, or Megatron Bridge, writes weights "
            "for Hugging Face, which can be inspected"
        )
    shards = sorted(name for name in children if "-of-" in name and name.endswith((".safetensors", ".bin")))
    if shards:
        return (
            f"has {len(shards)} parts of a model ({shards[0]}, ...) without the index that names them "
            "(*.index.json): download or copy it, too"
        )
    return ""


def describe_file(path: Path) -> str:
    """Describes a file that torch did not write; empty if its kind is unknown."""
    with path.open("rb") as file:
        start = file.read(len(_GIT_LFS))
    if start == _GIT_LFS:
        return "is a pointer of Git LFS, not the file itself: git lfs pull fetches it"
    return ""


def is_safetensors(path: Path) -> bool:
    """Returns whether a file begins as safetensors do: with eight bytes, the length of the JSON header behind them."""
    with path.open("rb") as file:
        start = file.read(9)
    return path.suffix == ".safetensors" or (start[8:] == b"{" and int.from_bytes(start[:8], "little") < 2**30)
