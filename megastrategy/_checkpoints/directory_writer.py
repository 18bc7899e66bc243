"""Writes checkpoint directories: every rank writes its part, with torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import EXTRA_FILE, CheckpointError, Collectives, Directory, RemoteDirectory
from .files import write_synced
from .held_signals import HeldSignals
from .paths import check_replaceable, reason_of, remove_path, removed_name, replace_path, sync_directory

if TYPE_CHECKING:  # importing it takes half a second, which is paid only to save directories
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import StorageWriter


def save_directory(
    state: dict[str, Any],
    extra: dict[str, Any],
    path: Directory,
    collectives: Collectives,
    *,
    is_apart: bool = False,
) -> None:
    """Writes every rank's part of ``state`` and rank 0's ``extra`` into a directory, which is complete or missing.

    On a disk it is made beside ``path``, as ``.NAME.incomplete``, and moved into place when it is complete; an
    older checkpoint at ``path`` exists until then. In a store a complete one is refused, see remote_directory's
    [Note: complete without a rename].

    Args:
        state: nested dictionaries of tensors, :class:`FlatShard` and plain values, with the same structure on all
            ranks, except for parts that a rank does not have. Any rank may write values that several ranks have.
        extra: plain types and tensors, saved by rank 0.
        path: of the directory; the same on all ranks, on a shared file system.
        collectives: over the ranks, on a gloo group that torch.distributed knows and nothing else uses meanwhile.
        is_apart: ``path`` is different on each rank, on a disk, and gets only this rank's files. The caller makes one
            checkpoint of all of them.

    Raises:
        CheckpointError: on all ranks if any of them could not write; an older checkpoint at ``path`` is unchanged.
        KeyboardInterrupt: on all ranks after Ctrl-C on any of them; the same for any BaseException.
    """
    with HeldSignals() as held:
        if isinstance(path, RemoteDirectory):
            _save_remotely(state, extra, path, collectives, held)
        else:
            _save_on_disk(state, extra, path, collectives, held, is_apart)


def _save_on_disk(
    state: dict[str, Any],
    extra: dict[str, Any],
    path: Path,
    collectives: Collectives,
    held: HeldSignals,
    is_apart: bool,
) -> None:
    incomplete = path.with_name(f".{path.name}.incomplete")
    is_rank_zero = collectives.rank == 0
    makes_directory = is_rank_zero or is_apart
    with _failing_together(path, collectives):
        held.deliver()
        if makes_directory:
            check_replaceable(path)
            remove_path(incomplete)
            remove_path(removed_name(path))
            incomplete.mkdir(parents=True)
    try:
        _write(state, _disk_writer(incomplete), path, collectives, held)
        with _failing_together(path, collectives):
            held.deliver()
            if is_rank_zero:
                write_synced(extra, incomplete / EXTRA_FILE)
            if makes_directory:
                replace_path(incomplete, path)
                # The rename itself, or the old one may be back after a crash.
                sync_directory(path.parent)
    # Also after Ctrl-C: users do not expect gigabytes here.
    except BaseException:
        if makes_directory:
            # The first error is reported; the next save of that name removes the rest.
            with contextlib.suppress(OSError):
                remove_path(incomplete)
        raise


def _save_remotely(
    state: dict[str, Any],
    extra: dict[str, Any],
    directory: RemoteDirectory,
    collectives: Collectives,
    held: HeldSignals,
) -> None:
    from .remote_writer import RemoteWriter

    with _failing_together(directory, collectives):
        held.deliver()
        if collectives.rank == 0:
            directory.prepare()
        writer = RemoteWriter(directory, extra)
    _write(state, writer, directory, collectives, held)


def _write(
    state: dict[str, Any],
    writer: StorageWriter,
    path: Directory,
    collectives: Collectives,
    held: HeldSignals,
) -> None:
    """Has torch write every rank's part. Collective.

    Raises:
        CheckpointError: on all ranks if any of them could not; Ctrl-C as in :func:`save_directory`.
    """
    from torch.distributed.checkpoint import api, state_dict_saver

    try:
        state_dict_saver.save(
            state, storage_writer=writer, planner=_planner_in_order(held), process_group=collectives.group
        )
    # Raised on all ranks when any failed: the saver has gathered all errors, and no rank waits.
    except api.CheckpointException as error:
        failures = {rank: _to_share(failure[0]) for rank, failure in error.failures.items()}
        raise _shared_failure(path, failures) from error


def _to_share(error: BaseException) -> str | BaseException:
    """Returns the text of an error, whose class other ranks may not know; Ctrl-C is returned as it is."""
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error


def _shared_failure(path: Directory, failures: Mapping[int, str | BaseException]) -> BaseException:
    """Returns the exception that all ranks raise after these failures, by rank: Ctrl-C of one rank is raised on all."""
    for rank, failure in sorted(failures.items()):
        if isinstance(failure, BaseException):
            failure.add_note(f"it came on rank {rank}, while all ranks saved the checkpoint {path}")
            return failure
    causes = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    return CheckpointError(f"the checkpoint {path} was not written: {causes}")


def _disk_writer(path: Path) -> StorageWriter:
    """Returns torch's writer, with the system's errors: other ranks get them pickled, without the chain of causes."""
    from torch.distributed.checkpoint import filesystem

    class Writer(filesystem.FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            outer = sys.exception()
            try:
                return super().write_data(*arguments)
            except Exception as error:
                raise reason_of(error, outer) from error

    return Writer(path)


def _planner_in_order(held: HeldSignals) -> SavePlanner:
    """Returns torch's planner, with names listed in the order of ranks, as one process would have saved them.

    torch's own order begins with the last rank's names, which lack those that only the first rank writes.
    """
    from torch.distributed.checkpoint import default_planner
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    class Planner(default_planner.DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            in_order: dict[str, Any] = {}
            for plan in all_plans:
                in_order |= {name: place for name, place in plan.planner_data.items() if name not in in_order}
            self.metadata = dataclasses.replace(metadata, planner_data=in_order)
            return plans, self.metadata

        def resolve_data(self, write_item: WriteItem) -> Any:
            held.deliver()
            return super().resolve_data(write_item)

    return Planner()


@contextlib.contextmanager
def _failing_together(path: Directory, collectives: Collectives) -> Iterator[None]:
    """Raises on all ranks if the block fails on any, so that no rank waits. Collective."""
    outer = sys.exception()
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - the system's, a user's value that cannot be pickled, Ctrl-C
        failure = reason_of(error, outer)
    # Also after an error here, so that ranks without one get it.
    gathered = collectives.all_gather_objects(_to_share(failure) if failure else None)
    failures = {rank: each for rank, each in enumerate(gathered) if each is not None}
    if failures:
        raise _shared_failure(path, failures) from failure
