"""torch's writers and planner, for directories that are complete or missing.

torch calls a writer on all ranks, and its ``prepare_global_plan`` and ``finish`` on rank 0 only: before the first rank
writes, and after the last one has written. An error in any of these calls is raised on all ranks, so that none waits.

Importing this takes half a second, which is paid only to save directories.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..core import EXTRA_FILE, Directory, RemoteDirectory, describe_missing_file, to_host
from .files import reported_by_the_system, write_synced
from .paths import check_replaceable, remove_path, removed_name, replace_path, sync_directory


def make_writer(path: Directory, extra: dict[str, Any], is_apart: bool) -> DiskWriter | StoreWriter:
    """Returns the writer of one directory, for one save; the arguments are those of ``save_directory``."""
    return StoreWriter(path, extra) if isinstance(path, RemoteDirectory) else DiskWriter(path, extra, is_apart)


class DiskWriter(FileSystemWriter):
    """Writes a directory beside its path, as ``.NAME.incomplete``, and moves it into place.

    An older checkpoint of that name exists until then. If ``is_apart``, every rank writes at its own path at once.
    """

    def __init__(self, target: Path, extra: dict[str, Any], is_apart: bool) -> None:
        super().__init__(target if is_apart else target.with_name(f".{target.name}.incomplete"))
        self._target = target
        self._extra = extra
        self._is_apart = is_apart
        self._has_directory = False

    def stage(self, state_dict: Any) -> Any:
        """Copies the state to host memory, for a save in the background."""
        return to_host(state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._is_apart:
            self._make_directory()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self._is_apart:
            self._make_directory()
        return super().prepare_global_plan(plans)

    def _make_directory(self) -> None:
        check_replaceable(self._target)
        remove_path(Path(self.path))
        remove_path(removed_name(self._target))
        Path(self.path).mkdir(parents=True)
        self._has_directory = True

    def write_data(self, *arguments: Any) -> Any:
        with reported_by_the_system():
            return super().write_data(*arguments)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with reported_by_the_system():
            super().finish(metadata, results)
            write_synced(self._extra, Path(self.path) / EXTRA_FILE)
        if not self._is_apart:
            replace_path(Path(self.path), self._target)
        # The rename itself, or the old one may be back after a crash.
        sync_directory(self._target.absolute().parent)

    def discard(self) -> None:
        """Removes the directory that this rank has made, after a save that failed: users do not expect gigabytes."""
        # The first error is reported; the next save of that name removes the rest.
        with contextlib.suppress(OSError):
            if self._has_directory:
                remove_path(Path(self.path))


class StoreWriter(FsspecWriter):
    """Writes a directory in an object store; see remote_directory's [Note: complete without a rename]."""

    def __init__(self, directory: RemoteDirectory, extra: dict[str, Any]) -> None:
        # An object exists when its put returns. With sync_files torch would sync every disk of the machine, since an
        # object has no file descriptor.
        super().__init__(directory.url, sync_files=False)
        self._directory = directory
        self._extra = extra

    def stage(self, state_dict: Any) -> Any:
        """Copies the state to host memory, for a save in the background."""
        return to_host(state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._directory.prepare()
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the checkpoint: ``.metadata`` is the last object.

        Raises:
            FileNotFoundError: if the parts of some rank are not in the store that this rank reaches.
        """
        places = [result.storage_data for of_rank in results for result in of_rank]
        # A rank may reach another store, or another view of it with other credentials, which only this check finds.
        missing = describe_missing_file(places, self._directory.sizes().get)
        if missing:
            raise FileNotFoundError(
                f"{missing}, though its rank has written it: do all ranks reach the same {self._directory.url}? A "
                "memory:// is each process's own"
            )
        file: Any
        with self.fs.create_stream(self._directory.object(EXTRA_FILE), "wb") as file:
            torch.save(self._extra, file)
        super().finish(metadata, results)

    def discard(self) -> None:
        """Leaves what was written: without ``.metadata`` it is no checkpoint, and the next save writes over it."""


class PlannerInOrder(DefaultSavePlanner):
    """Lists names in the order of ranks, as one process would have saved them.

    torch's own order begins with the last rank's names, which lack those that only the first rank writes.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        in_order: dict[str, Any] = {}
        for plan in all_plans:
            in_order |= {name: place for name, place in plan.planner_data.items() if name not in in_order}
        self.metadata = dataclasses.replace(metadata, planner_data=in_order)
        return plans, self.metadata
