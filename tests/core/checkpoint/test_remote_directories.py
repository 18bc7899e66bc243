"""Directories in object stores: complete or not there, whatever is cut off when, and equal to those on a disk."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastrategy._checkpoints.directories import read_remote_extra
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import (
    CheckpointError,
    OpenDirectory,
    RemoteDirectory,
    host_collectives,
    is_directory_checkpoint,
    make_collectives,
)
from tests.support.extra_packages import python_with
from tests.support.object_store import FAULTS, Kind, copy_to_disk, objects_in
from tests.support.processes import run_processes
from tests.support.sharded_training import Training, assert_same

ROOT = Path(__file__).parents[3]
READER = "megastrategy.core.checkpoint.remote_reader"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A place that has nothing in it yet."""
    return f"objects://{tmp_path}/store/run/last.ckpt"


# --- what is in them -------------------------------------------------------------------------------------------------


def save_near_and_far(folder: Path, url: str, dtype: torch.dtype) -> None:
    """On three ranks: two write after three of six steps, and one, two and all read and train on."""
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    own = {size: make_collectives(groups[size], torch.device("cpu")) for size in groups if dist.get_rank() < size}
    near, far, saved, expected = folder / "near", RemoteDirectory(url), {}, []
    if 2 in own:
        writer = Training(dtype, own[2])
        writer.train(range(3))
        save_directory(writer.state(), {"step": 3}, near, own[2])
        assert READER not in sys.modules, "those who save on a disk do not pay for it"
        save_directory(writer.state(), {"step": 3}, far, own[2])
        saved = writer.whole()
        expected = writer.train(range(3, 6))
    dist.barrier()
    for key in ("model", "optimizer"):
        assert_same(OpenDirectory(far).read(key), OpenDirectory(near).read(key))
    assert read_remote_extra(far, True) == torch.load(near / "meta.pt") == {"step": 3}
    for size, collectives in own.items():
        reader = Training(dtype, collectives, bucket_size=150)
        reader.module.load_state_dict(OpenDirectory(far).read("model"))
        reader.optimizer.load_sharded(url)
        loaded = reader.whole()
        if dist.get_rank() == 0:
            assert_same(loaded, saved, f"{size} ranks")
        losses = reader.train(range(3, 6))
        assert size != 2 or losses == expected


@pytest.mark.parametrize("dtype", [torch.float32])
def test_remote_directory_equals_one_on_disk(tmp_path: Path, url: str, dtype: torch.dtype) -> None:
    run_processes(3, save_near_and_far, tmp_path, url, dtype)
    copy_to_disk(url, tmp_path / "copied")
    assert_same(*(OpenDirectory(tmp_path / name).read("optimizer") for name in ("copied", "near")))
    assert torch.load(tmp_path / "copied" / "meta.pt") == {"step": 3}


def state(number: int) -> dict[str, Any]:
    """A state for each number; every rank writes a part."""
    weights = {f"weight {index}": torch.full((50,), float(number)) for index in range(4)}
    return {"model": weights, "optimizer": {"state": {"weight": {"step": torch.tensor(float(number))}}}}


def save(place: RemoteDirectory, number: int) -> None:
    save_directory(state(number), {"number": number}, place, host_collectives())


def load(place: RemoteDirectory) -> int:
    """The number of the save that is there, all of it."""
    found = {value.unique().item() for value in OpenDirectory(place).read("model").values()}
    found.add(OpenDirectory(place).read("optimizer")["state"]["weight"]["step"].item())
    [number] = found | {read_remote_extra(place, True)["number"]}
    return int(number)


# --- cut off ---------------------------------------------------------------------------------------------------------


def save_cut_off_at(place: RemoteDirectory, number: int, kind: Kind, at: int, rank: int) -> tuple[bool, bool]:
    """Whether the save failed, which it does on all ranks or none, and whether it came to the operation."""
    own = dist.get_rank() == rank
    message = ""
    if own:
        FAULTS.begin(kind, at)
    try:
        save(place, number)
    except CheckpointError as error:
        message = str(error)
    failed, reached = bool(message), FAULTS.raised
    FAULTS.end()
    assert not failed or message.startswith(f"the checkpoint {place} was not written: rank {rank}: StoreError")
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (failed, reached if own else None))
    assert len({each for each, _ in told}) == 1, "ranks have to agree"
    return failed, told[rank][1]


def cut_off_at_each_operation(url: str, kind: Kind, rank: int) -> list[str]:
    """Before each operation (``dead``), at it (``once``) and after it (``answer lost``). Returns what became of it."""
    outcomes = []
    for at in itertools.count():
        place = RemoteDirectory(f"{url}/{at}")
        failed, reached = save_cut_off_at(place, 1, kind, at, rank)
        outcomes.append("failed" if failed else "complete")
        if is_directory_checkpoint(place):
            assert load(place) == 1
        else:
            assert failed
            with pytest.raises(CheckpointError, match=f"{place} is no complete directory"):
                _ = OpenDirectory(place).keys
            dist.barrier()
            save(place, 2)
            dist.barrier()
            assert load(place) == 2
        if not reached:
            return outcomes
    raise AssertionError


def test_a_save_is_complete_or_refused_by_name(url: str) -> None:
    """Rank 0 puts its part, the extra file and .metadata.tmp, copies that to .metadata and removes it. The last of the
    saves is not disturbed."""
    outcomes, _ = run_processes(2, cut_off_at_each_operation, url, "dead", 0)
    assert outcomes == ["failed"] * 5 + ["complete"]


def test_a_rank_that_cannot_write_is_named_by_all(url: str) -> None:
    """Rank 1's store fails before its only operation, which puts its part: the errors of both ranks name rank 1, see
    :func:`save_cut_off_at`. The next save is complete."""
    outcomes, _ = run_processes(2, cut_off_at_each_operation, url, "dead", 1)
    assert outcomes == ["failed", "complete"]


def save_where_nobody_else_looks() -> str:
    with pytest.raises(CheckpointError) as raised:
        save(RemoteDirectory("memory://run/last.ckpt"), 1)
    assert not is_directory_checkpoint(RemoteDirectory("memory://run/last.ckpt"))
    return str(raised.value)


def test_rank_in_another_store_is_noticed() -> None:
    """Processes have a memory:// each; so it is with another address, or another bucket of the same name."""
    for message in run_processes(2, save_where_nobody_else_looks):
        assert message.startswith("the checkpoint memory://run/last.ckpt was not written: rank 0: FileNotFoundError")
        assert "__1_0.distcp is missing, though its rank has written it" in message


# --- in the life of a place ------------------------------------------------------------------------------------------


def save_over_a_complete_one(url: str) -> tuple[str, int]:
    place = RemoteDirectory(url)
    assert not is_directory_checkpoint(place)
    dist.barrier()
    save(place, 1)
    assert load(place) == 1, "whatever this rank has listed before"
    with pytest.raises(CheckpointError) as raised:
        save(place, 2)
    return str(raised.value), load(place)


def test_a_complete_directory_is_never_overwritten(url: str) -> None:
    for message, number in run_processes(2, save_over_a_complete_one, url):
        assert number == 1
        assert message.startswith(f"the checkpoint {url} was not written: rank 0: FileExistsError")
        assert "Save under another name, with the step in it" in message


def refuse_to_replace(url: str) -> str:
    store = RemoteDirectory(url)
    if dist.get_rank() == 0:
        store.file_system().pipe_file(store.object("precious.txt"), b"mine")
    dist.barrier()
    with pytest.raises(CheckpointError) as raised:
        save(store, 1)
    return str(raised.value)


def test_what_is_no_checkpoint_is_not_replaced(url: str) -> None:
    for message in run_processes(2, refuse_to_replace, url):
        assert "rank 0: IsADirectoryError" in message
        assert "it is a directory, and no checkpoint" in message
    assert objects_in(url) == {"precious.txt"}


def remove_cut_off(url: str) -> int:
    """In how many places."""
    for at in itertools.count():
        place = RemoteDirectory(f"{url}/{at}")
        save(place, 1)
        FAULTS.begin("dead", at)
        with contextlib.suppress(OSError):
            place.remove()
        FAULTS.end()
        assert is_directory_checkpoint(place) == (at == 0)
        place.remove()
        assert not place.is_dir()
        assert not objects_in(place.url)
        if not FAULTS.raised:
            return at
    raise AssertionError


def test_interrupted_removal_leaves_no_checkpoint(url: str) -> None:
    assert run_processes(1, remove_cut_off, url)[0] >= 3, "there are three objects"


# --- one process -----------------------------------------------------------------------------------------------------


# --- a store that is not ours ----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_so_it_is_in_s3(tmp_path: Path) -> None:
    """Or in what answers as it does: moto's server, by way of s3fs. 300 MB to install, and five minutes."""
    python = python_with(tmp_path, "s3fs", "moto[server,s3]", imports="s3fs")
    command = [python, "-m", "campaigns.kills.s3", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
