"""Writes directories in object stores with torch.distributed.checkpoint; see remote_directory's
[Note: complete without a rename].

Importing it takes half a second, which is paid only to save such directories.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..core import EXTRA_FILE, MARKER, RemoteDirectory, describe_missing_file, extra_name, save_prefix


class RemoteWriter(FsspecWriter):
    """Writes one directory, in one save.

    ``extra``: plain types and tensors, saved by rank 0.

    Attributes:
        may_be_complete: on rank 0, True after the store was asked to write ``.metadata``. Even if that failed, the
            answer to one of several attempts may have been lost, so the parts have to stay.
    """

    def __init__(self, directory: RemoteDirectory, extra: dict[str, Any]) -> None:
        # An object exists when its put returns. With sync_files torch would sync every disk of the machine, since an
        # object has no file descriptor.
        super().__init__(directory.url, sync_files=False)
        self._directory = directory
        self._extra = extra
        self.may_be_complete = False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan: torch's method warns of a checkpoint that will be overwritten, but none is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives the parts of all ranks names with the id of this save. Called on rank 0 only."""
        plans = super().prepare_global_plan(plans)
        names = [save_prefix(self.save_id) + plan.storage_data.prefix for plan in plans]
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(plan.storage_data, prefix=name))
            for plan, name in zip(plans, names, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the checkpoint, after all ranks have written their parts. Called on rank 0 only.

        Raises:
            FileNotFoundError: if the parts of some rank are not in the store that this rank reaches.
        """
        directory = self._directory
        places = [result.storage_data for of_rank in results for result in of_rank]
        # A rank may reach another store, or another view of it with other credentials, which only this check finds.
        if missing := describe_missing_file(places, directory.file_sizes()):
            raise FileNotFoundError(
                f"{missing}, though its rank has written it: do all ranks reach the same {directory.url}? A memory:// "
                "is each process's own"
            )
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        buffer = io.BytesIO()
        torch.save(self._extra, buffer)
        directory.put(extra_name(metadata), buffer.getvalue())
        if directory.size(EXTRA_FILE) is not None:
            self._hide_old_extra()
        content = pickle.dumps(metadata)
        self.may_be_complete = True
        try:
            directory.put(MARKER, content)
        except Exception:
            # The write may have succeeded, and only its answer was lost.
            if not self._is_complete():
                raise

    def _is_complete(self) -> bool:
        found = self._directory.metadata()
        return found is not None and found.storage_meta == self.storage_meta()

    def _hide_old_extra(self) -> None:
        """Removes the copy, which other readers would combine with the new tensors. The original stays."""
        directory = self._directory
        old = directory.metadata()
        # A directory that was copied from a disk has no original.
        if old is not None and directory.size(extra_name(old)) is None:
            directory.copy(EXTRA_FILE, extra_name(old))
        directory.file_system().rm_file(directory.object(EXTRA_FILE))
