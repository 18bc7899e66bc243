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
from typing import TYPE_CHECKING, Any

import torch

from ..core import CheckpointError

if TYPE_CHECKING:  # importing it takes half a second
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

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
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"an object of {found[1]}" if found and not trust else "what torch cannot load"
    remedy = "" if trust else ". If you trust its writer, --trust loads it, and may run code from it"
    return CheckpointError(f"{path} holds {what}{remedy}")


def directory_reader(path: Path, trust: bool) -> FileSystemReader:
    """Makes torch's reader; it raises CheckpointError for a ``.metadata`` that needs ``trust``."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            if not trust:
                file = path / ".metadata"
                with _refused(file), file.open("rb") as content:
                    _Unpickler(content).load()
            return super().read_metadata(*args, **kwargs)

    return Reader(path)


def load_planner(path: Path, trust: bool) -> type[DefaultLoadPlanner]:
    """Makes torch's planner; it raises CheckpointError for a value that needs ``trust``."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            if not trust:
                with _refused(path):
                    torch.load(value, weights_only=True)
                value.seek(0)
            super().load_bytes(read_item, value)

    return Planner


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        raise refusal(path, error, trust=False) from error
