"""Saves of directories that a full disk, Ctrl-C or a link in the way would end: all ranks raise the reason."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import CheckpointError, OpenDirectory, host_collectives
from tests.support.processes import run_processes

SIZE = 200_000
"""Numbers of each rank: its file has four times as many bytes."""


def state_of(rank: int, extra: Any = None) -> dict[str, Any]:
    """A tensor that each rank writes itself, and a value that is pickled."""
    value = {} if extra is None else {f"pickled by {rank}": extra}
    return {"model": {f"of rank {rank}": torch.full((SIZE,), float(rank)), **value, f"small {rank}": torch.ones(1)}}


def old_checkpoint(path: Path) -> None:
    save_directory({"model": {"old": torch.ones(3)}}, {}, path, host_collectives())


def assert_old_is_whole(path: Path, *others: str) -> None:
    dist.barrier()
    assert OpenDirectory(path).read("model")["old"].tolist() == [1.0, 1.0, 1.0]
    assert sorted(child.name for child in path.parent.iterdir()) == sorted([path.name, *others])
    dist.barrier()


# --- full disks ------------------------------------------------------------------------------------------------------


def save_on_full_disk(path: Path, what: str) -> None:
    old_checkpoint(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    state, extra = state_of(dist.get_rank()), {}
    if what == "meta.pt":
        state, extra = {"model": {"small": torch.ones(3)}}, {"large": torch.ones(SIZE)}
    writer = 1 if what == "a part" else 0
    if dist.get_rank() == writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, limits[1]))
    with pytest.raises(CheckpointError) as raised:
        save_directory(state, extra, path, host_collectives())
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(raised.value) == (
        f"the checkpoint {path} was not written: rank {writer}: OSError: [Errno 27] File too large"
    )
    assert_old_is_whole(path)
    save_directory(state, extra, path, host_collectives())


@pytest.mark.parametrize("what", ["a part", "meta.pt"])
def test_a_full_disk_is_reported_in_the_systems_words(tmp_path: Path, what: str) -> None:
    run_processes(2, save_on_full_disk, tmp_path / "last.ckpt", what)


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


class Raises:
    """Raises as Ctrl-C does, when it is pickled while the part of a rank is written."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def interrupt_save(path: Path) -> None:
    collectives = host_collectives()
    old_checkpoint(path)
    rank = dist.get_rank()
    with pytest.raises(KeyboardInterrupt) as raised:
        save_directory(state_of(rank, Raises() if rank == 1 else None), {}, path, collectives)
    assert "ranks saved the checkpoint" in raised.value.__notes__[0]
    assert_old_is_whole(path)
    save_directory(state_of(rank), {}, path, collectives)
    assert "of rank 1" in OpenDirectory(path).read("model")


def test_ctrl_c_ends_a_save_on_all_ranks_as_ctrl_c(tmp_path: Path) -> None:
    """Not as CheckpointError, at which no callback saves; and no rank waits for one that has left."""
    run_processes(2, interrupt_save, tmp_path / "last.ckpt")
