"""Reads directories in object stores with torch.distributed.checkpoint; see remote_directory's
[Note: complete without a rename].

Importing it takes half a second, which is paid only to load such directories.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from .remote_directory import RemoteDirectory

# torch reads each tensor's end before its beginning, and most tensors are small: without blocks each tensor would take
# one or two requests.
_BLOCK_BYTES = 8 * 2**20
_MAX_BLOCKS = 8  # in memory at once


class RemoteReader(FsspecReader):
    """Reads a directory in few requests."""

    def __init__(self, directory: RemoteDirectory) -> None:
        super().__init__(directory.url)
        in_blocks = _InBlocks()
        in_blocks.fs = directory.file_system()
        self.fs = in_blocks  # type: ignore[assignment]  # as in torch

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads in the order of the bytes, whatever the order of the plan."""
        items = sorted(plan.items, key=lambda item: self.storage_data[item.storage_index].offset)
        return super().read_data(dataclasses.replace(plan, items=items), planner)


class _InBlocks(FileSystem):
    """Opens files that are read block by block, with a cache of blocks for the next reads."""

    fs: Any

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        options = {"cache_type": "blockcache", "cache_options": {"maxblocks": _MAX_BLOCKS}}
        with self.fs.open(os.fspath(path), mode, block_size=_BLOCK_BYTES, **options) as stream:
            yield stream
