"""Checkpoints that are directories: every rank writes its part with torch.distributed.checkpoint.

Every tensor in the directory is whole for whoever reads it: on another number of ranks, under FSDP, or with a
consolidation tool. What an optimizer has in it is in :mod:`.sharded_optimizer`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import io
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..collectives import Collectives
from ..errors import CheckpointError
from ..local_parts import dtensors_of, empty_like_part
from .completeness import describe_hole, describe_missing_part
from .held_signals import HeldSignals
from .remote_directory import EXTRA_FILE, MARKER, Directory, RemoteDirectory, extra_name

if TYPE_CHECKING:  # importing it takes half a second, which only those pay who save or load directories
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

NOT_TENSORS = "megatron_ddp_not_tensors"
"""In ``EXTRA_FILE``, by the key of each module: the values in its state that are no tensors (``_extra_state``). The
format of directories would flatten them: empty dictionaries are lost in it, and keys become strings."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


# --- writing ---------------------------------------------------------------------------------------------------------


def save_directory(
    state: dict[str, Any],
    extra: dict[str, Any],
    path: Directory,
    collectives: Collectives,
    *,
    is_apart: bool = False,
) -> None:
    """Writes every rank's part of ``state`` and rank 0's ``extra`` into a directory, which is complete or not there.

    On a disk it is made beside ``path``, as ``.NAME.incomplete``, and moved into place when everything is there; for
    others see remote_directory's [Note: complete without a rename]. What was at ``path`` before is there until then.

    Args:
        state: nested dictionaries of tensors, :class:`FlatShard` and plain values; the same structure on all ranks
            but for parts that a rank does not have. Of what several ranks have it does not matter who writes it.
        extra: plain types and tensors, saved by rank 0.
        path: of the directory; the same on all ranks, on a file system that all share.
        collectives: over the ranks, on a gloo group that torch.distributed knows and nobody else uses meanwhile.
        is_apart: ``path`` is another one on each rank, on a disk, which has this rank's files alone. The union of all
            is the checkpoint, and somebody else makes it.

    Raises:
        CheckpointError: on all ranks if any of them could not write; what was at ``path`` is as it was.
        KeyboardInterrupt: on all ranks after Ctrl-C on any of them, as every exception that is no Exception.
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
    staged = path.with_name(f".{path.name}.incomplete")
    is_rank_zero = collectives.rank == 0
    makes_directory = is_rank_zero or is_apart
    with _failing_together(path, collectives):
        held.deliver()
        if makes_directory:
            check_replaceable(path)
            remove_path(staged)
            remove_path(removed_name(path))
            staged.mkdir(parents=True)
    try:
        _write(state, _disk_writer(staged), path, collectives, held)
    except BaseException:
        if makes_directory:
            # Its first error is the one to report; the next save of that name removes the rest.
            with contextlib.suppress(OSError):
                remove_path(staged)
        raise
    with _failing_together(path, collectives):
        if not makes_directory:
            held.deliver()
        else:
            try:
                held.deliver()
                if is_rank_zero:
                    _write_extra(staged / EXTRA_FILE, extra)
                replace_path(staged, path)
                # And the rename itself, without which the old one may be back.
                sync_directory(path.parent)
            # Ctrl-C too: gigabytes that nobody will look for.
            except BaseException:
                remove_path(staged)
                raise


def _save_remotely(
    state: dict[str, Any],
    extra: dict[str, Any],
    directory: RemoteDirectory,
    collectives: Collectives,
    held: HeldSignals,
) -> None:
    from .remote_storage import RemoteWriter

    is_rank_zero = collectives.rank == 0
    with _failing_together(directory, collectives):
        held.deliver()
        if is_rank_zero:
            directory.prepare()
        writer = RemoteWriter(directory, extra)
    try:
        _write(state, writer, directory, collectives, held)
    except BaseException as error:
        if is_rank_zero and not writer.may_be_complete:
            try:
                directory.tidy()
            # Whatever the client of a store raises that is not well: its first error is the one to tell.
            except Exception as second:  # noqa: BLE001
                error.add_note(f"what was written of it is still in {directory}, of no use: {second!r}")
        raise
    if is_rank_zero:
        try:
            directory.tidy()
        # The checkpoint is complete, and no training shall end for what takes space in vain until the next save.
        except Exception:
            logging.getLogger("megastrategy").warning(
                "%s is complete; what it replaces was not all removed", directory, exc_info=True
            )


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
    # Raised on all ranks, when any failed: the saver has gathered all errors, and no rank waits.
    except api.CheckpointException as error:
        failures = {rank: _to_share(failure[0]) for rank, failure in error.failures.items()}
        raise _shared_failure(path, failures) from error


def _to_share(error: BaseException) -> str | BaseException:
    """Returns the text of an error, which may be of any class of the user's, and Ctrl-C itself."""
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error


def _shared_failure(path: Directory, failures: Mapping[int, str | BaseException]) -> BaseException:
    """Returns what all ranks raise after these failures, by rank: Ctrl-C of one rank ends all as Ctrl-C does."""
    for rank, failure in sorted(failures.items()):
        if isinstance(failure, BaseException):
            failure.add_note(f"it came on rank {rank}, while all ranks saved the checkpoint {path}")
            return failure
    causes = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    return CheckpointError(f"the checkpoint {path} was not written: {causes}")


def _disk_writer(path: Path) -> StorageWriter:
    """torch's, whose errors are those of the system: other ranks get them pickled, without the chain of causes."""
    from torch.distributed.checkpoint import filesystem

    class Writer(filesystem.FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            outer = sys.exception()
            try:
                return super().write_data(*arguments)
            except Exception as error:
                raise reason_of(error, outer) from error

    return Writer(path)


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


def _planner_in_order(held: HeldSignals) -> SavePlanner:
    """torch's, whose directory lists names in the order of the ranks that have them, each as its rank does: who makes
    one file of it gets what one process would have saved. torch's own begins with the last rank's, which lack what the
    first one alone writes."""
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


def _write_extra(path: Path, extra: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(extra, file)
        file.flush()
        # Before the rename: after a power cut a name may be on the disk without the data that it stands for.
        os.fsync(file.fileno())


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


@contextlib.contextmanager
def _failing_together(path: Directory, collectives: Collectives) -> Iterator[None]:
    """If the block fails on any rank, all ranks raise, and none waits for it. Collective."""
    outer = sys.exception()
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - of the system, of a user's value that cannot be pickled, Ctrl-C
        failure = reason_of(error, outer)
    # After an error of the system too, so that ranks on which nothing went wrong learn of the others'.
    gathered = collectives.all_gather_objects(_to_share(failure) if failure else None)
    if failures := {rank: each for rank, each in enumerate(gathered) if each is not None}:
        raise _shared_failure(path, failures) from failure


# --- reading ---------------------------------------------------------------------------------------------------------


def is_directory_checkpoint(path: Directory) -> bool:
    """Whether :func:`save_directory`, FSDP or another user of torch.distributed.checkpoint wrote it."""
    if isinstance(path, RemoteDirectory):
        return path.size(MARKER) is not None
    return (path / MARKER).is_file()


def _reader(path: Directory) -> StorageReader:
    if isinstance(path, RemoteDirectory):
        from .remote_storage import RemoteReader

        return RemoteReader(path)
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(path)


def read_metadata(path: Directory) -> Metadata:
    """Reads what the directory says that it holds, and checks that its files and tensors are whole.

    Raises:
        CheckpointError: if it is no complete checkpoint.
    """
    try:
        metadata = _reader(path).read_metadata()
        missing = describe_missing_part(metadata.storage_data.values(), _sizes(path))
    # Whatever a broken pickle raises, down to AttributeError and EOFError, and a store's client.
    except Exception as error:
        raise CheckpointError(f"{path} is no complete directory of torch.distributed.checkpoint: {error!r}") from error
    if missing:
        raise CheckpointError(f"{path} is not complete: {missing}. Resume from another checkpoint")
    if hole := describe_hole(metadata):
        raise CheckpointError(f"{path} is not complete: {hole}")
    return metadata


def _sizes(path: Directory) -> Callable[[str], int | None]:
    """Returns what tells a file's bytes by its name; None if it is not there."""
    if isinstance(path, RemoteDirectory):
        return path.size_of()
    return lambda name: (path / name).stat().st_size if (path / name).is_file() else None


def read_remote_extra(directory: RemoteDirectory, weights_only: bool | None) -> Any:
    """Loads what rank 0 saved beside the tensors, as ``torch.load`` does.

    Raises:
        FileNotFoundError: if it is not there.
    """
    metadata = directory.metadata()
    # The original: the copy for other readers comes after it, and a save may have been cut off in between.
    content = directory.read(extra_name(metadata)) if metadata is not None else None
    if content is None and (content := directory.read(EXTRA_FILE)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory.object(EXTRA_FILE))
    return torch.load(io.BytesIO(content), "cpu", weights_only=weights_only)


def directory_keys(path: Directory) -> set[str]:
    """The keys of the outermost dictionary in the directory.

    Raises:
        CheckpointError: if it is no complete checkpoint.
    """
    return {str(place[0]) for place in (read_metadata(path).planner_data or {}).values()}


def not_tensors(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The entry of the file beside the tensors for the states of modules, by key; empty if they are tensors alone."""
    found = {
        key: {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for key, values in state.items()
    }
    found = {key: values for key, values in found.items() if values}
    return {NOT_TENSORS: found} if found else {}


def read_directory(
    path: Directory,
    key: str,
    make: Callable[[tuple[Any, ...], TensorStorageMetadata], Tensor | None] | None = None,
) -> dict[str, Any]:
    """Reads what is under ``key``, nested as it was saved. Not collective: each rank reads what it asks for.

    Args:
        path: of the directory.
        key: of the outermost dictionary.
        make: the tensor to read into, from its place (keys, outermost first) and what the file says of it; a
            :class:`FlatShard` reads no more than its part, None nothing. By default a whole tensor in host memory.

    Raises:
        CheckpointError: if the directory is not complete, or cannot be read.
    """
    from torch.distributed.checkpoint import api, state_dict_loader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = read_metadata(path)
    places = {name: place for name, place in (metadata.planner_data or {}).items() if str(place[0]) == key}
    targets: dict[str, Any] = {}
    for name, place in places.items():
        saved = metadata.state_dict_metadata[name]
        # A plain value needs no target: the reader puts it here.
        if not isinstance(saved, TensorStorageMetadata):
            targets[name] = None
            continue
        target = make(place, saved) if make else torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        if target is not None:
            targets[name] = target
    if targets:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*to load in a single process")  # so each rank does
                state_dict_loader.load(targets, storage_reader=_reader(path), no_dist=True)
        except (Exception, api.CheckpointException) as error:  # the second is a BaseException
            raise CheckpointError(f"{path} cannot be read, {key!r} in it: {error!r}") from error
    nested: dict[str, Any] = {}
    for name, value in targets.items():
        _set(nested, places[name][1:], value)
    return nested


def read_weights(path: Directory, key: str, module: nn.Module, elsewhere: Collection[str] = ()) -> dict[str, Any]:
    """Reads the state of a module under ``key``, whole but for tensor-parallel parameters: of these a rank reads its
    part alone, as a DTensor. Not collective.

    ``elsewhere``: the names of what is not read, since other ranks have it.

    Raises:
        CheckpointError: if the directory is not complete, or cannot be read.
    """
    params = dtensors_of(module, each_name=True)

    def make(place: tuple[Any, ...], saved: TensorStorageMetadata) -> Tensor | None:
        if str(place[1]) in elsewhere:
            return None
        param = params.get(str(place[1]))
        # One of another shape is told of by whoever loads the state, with its name.
        if param is None or len(place) > 2 or tuple(saved.size) != tuple(param.shape):
            return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        return empty_like_part(param, saved.properties.dtype)

    return read_directory(path, key, make)


def _set(nested: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    """Sets a value in nested dictionaries and lists, making them on the way."""
    here: Any = nested
    for step, following in zip(place, (*place[1:], None), strict=True):
        # The next step of the place says what stands here: a number needs a list, a name a dictionary.
        fresh = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(here, list):
            # Places come in any order; a list is as long as the highest number so far.
            here.extend([None] * (step + 1 - len(here)))
            if following is None or here[step] is None:
                here[step] = fresh
        elif following is None or step not in here:
            here[step] = fresh
        here = here[step]
