"""Writes directories in object stores with torch.distributed.checkpoint; see remote_directory's
[Note: complete without a rename].

Importing it takes half a second, which is paid only to save such directories.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..core import EXTRA_FILE, MARKER, RemoteDirectory, describe_missing_file


class RemoteWriter(FsspecWriter):
    """Writes one directory, in one save.

    ``extra``: plain types and tensors, saved by rank 0.
    """

    def __init__(self, directory: RemoteDirectory, extra: dict[str, Any]) -> None:
        # An object exists when its put returns. With sync_files torch would sync every disk of the machine, since an
        # object has no file descriptor.
        super().__init__(directory.url, sync_files=False)
        self._directory = directory
        self._extra = extra

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan: torch's method warns of a checkpoint that will be overwritten, which rank 0 has refused."""
        return plan

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the checkpoint, after all ranks have written their parts. Called on rank 0 only.

        Raises:
            FileNotFoundError: if the parts of some rank are not in the store that this rank reaches.
        """
        directory = self._directory
        places = [result.storage_data for of_rank in results for result in of_rank]
        # A rank may reach another store, or another view of it with other credentials, which only this check finds.
        missing = describe_missing_file(places, directory.sizes().get)
        if missing:
            raise FileNotFoundError(
                f"{missing}, though its rank has written it: do all ranks reach the same {directory.url}? A memory:// "
                "is each process's own"
            )
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        buffer = io.BytesIO()
        torch.save(self._extra, buffer)
        directory.put(EXTRA_FILE, buffer.getvalue())
        directory.put(MARKER, pickle.dumps(metadata))
