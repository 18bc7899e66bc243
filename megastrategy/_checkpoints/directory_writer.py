"""Saves checkpoint directories: every rank writes its part, with torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, cast

from ..core import CheckpointError, Collectives, Directory, to_host


def save_directory(
    state: dict[str, Any],
    extra: dict[str, Any],
    path: Directory,
    collectives: Collectives | None,
    *,
    is_apart: bool = False,
) -> None:
    """Writes every rank's part of ``state`` and rank 0's ``extra`` into a directory, which is complete or missing.

    In a store a complete one is refused, see remote_directory's [Note: complete without a rename].

    Args:
        state: nested dictionaries of tensors, :class:`FlatShard` and plain values, with the same structure on all
            ranks, except for parts that a rank does not have. Any rank may write values that several ranks have.
        extra: plain types and tensors, saved by rank 0.
        path: of the directory; the same on all ranks, on a shared file system.
        collectives: over the ranks, on a gloo group that torch.distributed knows and nothing else uses meanwhile. None
            in a process without ranks.
        is_apart: ``path`` is different on each rank, on a disk, and gets only this rank's files. The caller makes one
            checkpoint of all of them.

    Raises:
        CheckpointError: on all ranks if any of them could not write; an older checkpoint at ``path`` is unchanged.
        KeyboardInterrupt: on all ranks after Ctrl-C on any of them while it writes; the same for any BaseException.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    from .writers import PlannerInOrder, make_writer

    writer = make_writer(path, extra, is_apart)
    group = None if collectives is None else collectives.group
    try:
        with _failures_named(path), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*to save in a single process")
            save(
                state,
                storage_writer=writer,
                planner=PlannerInOrder(),
                process_group=group,
                no_dist=collectives is None,
            )
    except BaseException:
        writer.discard()
        raise


class BackgroundSave:
    """A save of a directory that goes on in a thread, from a copy of the state in host memory.

    Args as :func:`save_directory`. The constructor returns when the copy is complete.
    """

    def __init__(self, state: dict[str, Any], extra: dict[str, Any], path: Directory, collectives: Collectives) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        from .writers import PlannerInOrder, make_writer

        self._path = path
        self._writer = make_writer(path, to_host(extra), is_apart=False)
        self._future = cast(
            Future[Any],
            async_save(state, storage_writer=self._writer, planner=PlannerInOrder(), process_group=collectives.group),
        )
        self.actions_after: list[Callable[[], None]] = []

    def wait(self) -> None:
        """Returns when the save has ended. Ctrl-C may interrupt this."""
        wait_for([self._future])

    def finish(self) -> None:
        """Raises the error of a save that failed; otherwise runs the actions after it."""
        try:
            with _failures_named(self._path):
                self._future.result()
        except BaseException:
            self._writer.discard()
            raise
        for action in self.actions_after:
            action()


@contextlib.contextmanager
def _failures_named(path: Directory) -> Iterator[None]:
    """Raises the failures of ranks, which torch has gathered, as one error: CheckpointError, or Ctrl-C of a rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in sorted(error.failures.items())}
        for rank, failure in failures.items():
            if not isinstance(failure, Exception):
                failure.add_note(f"it came on rank {rank}, while all ranks saved the checkpoint {path}")
                raise failure from error
        causes = "; ".join(f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items())
        raise CheckpointError(f"the checkpoint {path} was not written: {causes}") from error
