"""Reads directories of torch.distributed.checkpoint without running code that they may hold.

The format is pickled in two places: its ``.metadata``, and every value that is no tensor. torch's own reader makes
objects of any class of both. Here they are of the classes that torch writes, unless the caller trusts the writer.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .._checkpoints.foreign import describe_deepspeed
from ..core import MARKER, CheckpointError, OpenDirectory, is_directory_checkpoint

_PATHS = {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
_OF_TORCH = {
    "builtins": {"frozenset", "set"},
    "collections": {"OrderedDict"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "torch": {"Size"},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},  # before 2.3
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.serialization": {"_get_layout"},
}
"""Lists by module the classes in a ``.metadata``; and dtypes, layouts and memory formats."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        of_torch = isinstance(getattr(torch, global_name, None), torch.dtype | torch.layout | torch.memory_format)
        if global_name in _OF_TORCH.get(module_name, ()) or (module_name == "torch" and of_torch):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"GLOBAL {module_name}.{global_name} is not what torch writes")  # torch's words


def refusal(path: Path, error: pickle.UnpicklingError, trust: bool) -> CheckpointError:
    """Makes the error for a file in which something is not loaded."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"an object of {match[1]}" if match and not trust else "what torch cannot load"
    remedy = "" if trust else ". If you trust its writer, --trust loads it, and may run code from it"
    return CheckpointError(f"{path} holds {what}{remedy}")


def open_checked(path: Path, trust: bool) -> OpenDirectory:
    """Opens a directory. Reading it raises CheckpointError for a value that needs ``trust``.

    Raises:
        CheckpointError: if it is no directory of torch.distributed.checkpoint.
    """
    if not is_directory_checkpoint(path):
        what = describe_deepspeed(path) or (
            "is no complete sharded checkpoint: it has no .metadata, which is written last. If a folder "
            "has several checkpoints, or is of Accelerator.save_state, name one of the files or directories"
        )
        raise CheckpointError(f"{path} {what}")
    if trust:
        return OpenDirectory(path)
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # importing it takes half a second

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **options: Any) -> Any:
            file = path / MARKER
            with _refused(file), file.open("rb") as content:
                _Unpickler(content).load()
            return super().read_metadata(*args, **options)

        def read_data(self, plan: Any, planner: Any) -> Any:
            load = planner.load_bytes

            def load_checked(read_item: Any, value: io.BytesIO) -> None:
                with _refused(path):
                    torch.load(value, weights_only=True)
                value.seek(0)
                load(read_item, value)

            planner.load_bytes = load_checked
            return super().read_data(plan, planner)

    return OpenDirectory(path, Reader(path))


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        raise refusal(path, error, trust=False) from error
