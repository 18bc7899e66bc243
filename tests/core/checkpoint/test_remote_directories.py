"""Directories in object stores: complete or not there, whatever is cut off when, and equal to those on a disk."""

from __future__ import annotations

import contextlib
import io
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from megastrategy import DistributedDataParallel, DistributedOptimizer
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
from tests.support.object_store import FAULTS, Kind, ObjectStore, copy_from_disk, copy_to_disk, objects_in
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_hold_what_a_directory_on_a_disk_does_for_any_number_of_ranks(
    tmp_path: Path, url: str, dtype: torch.dtype
) -> None:
    run_processes(3, save_near_and_far, tmp_path, url, dtype)
    copy_to_disk(url, tmp_path / "copied")
    assert_same(*(OpenDirectory(tmp_path / name).read("optimizer") for name in ("copied", "near")))
    assert torch.load(tmp_path / "copied" / "meta.pt") == {"step": 3}


def read_what_torch_wrote(url: str) -> None:
    writer, reader = Training(), Training(bucket_size=150)
    writer.train(range(2))
    # By default it syncs every disk of the machine.
    dcp.save(writer.state(), storage_writer=FsspecWriter(url, sync_files=False))
    reader.module.load_state_dict(OpenDirectory(RemoteDirectory(url)).read("model"))
    reader.optimizer.load_sharded(url)
    loaded, saved = reader.whole(), writer.whole()
    if dist.get_rank() == 0:
        assert_same(loaded, saved)
    assert reader.train(range(2, 4)) == writer.train(range(2, 4))


def test_a_plain_loop_reads_what_torch_wrote(url: str) -> None:
    run_processes(2, read_what_torch_wrote, url)


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


def assert_settled(url: str) -> None:
    """The store has the objects of one save, and of no other."""
    names = objects_in(url)
    assert len(names) == 5, names
    assert {".metadata", "meta.pt"} < names
    [original] = (name for name in names if name.startswith("meta-"))
    prefix = original.removeprefix("meta-").removesuffix(".pt")
    assert names - {".metadata", "meta.pt", original} == {f"{prefix}__0_0.distcp", f"{prefix}__1_0.distcp"}


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


def cut_off_at_each_operation(url: str, kind: Kind, rank: int, replaces: bool) -> list[str]:
    """Before each operation (``dead``), at it (``once``) and after it (``answer lost``). Returns what became of it."""
    outcomes = []
    for at in itertools.count():
        place = RemoteDirectory(f"{url}/{at}")
        if replaces:
            save(place, 0)
        failed, reached = save_cut_off_at(place, 1, kind, at, rank)
        outcomes.append("not there" if failed else "complete")
        if failed and not replaces:
            with pytest.raises(CheckpointError, match=f"{place} is no complete directory"):
                _ = OpenDirectory(place).keys
        else:
            assert load(place) == (0 if failed else 1), f"at operation {at}"
        # For those who copy it to a disk there is none, or the one that belongs to the tensors.
        copied = [name for name in objects_in(place.url) if name == "meta.pt"]
        if copied and is_directory_checkpoint(place):
            assert torch.load(io.BytesIO(place.read("meta.pt") or b""))["number"] == (0 if failed else 1)
        dist.barrier()
        save(place, 2)
        dist.barrier()  # rank 0 tidies up, and no rank waits for that
        assert load(place) == 2
        assert_settled(place.url)
        if not reached:
            return outcomes
    raise AssertionError


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["dead", "answer lost", "once"])
def test_what_is_replaced_is_complete_until_the_new_one_is(url: str, kind: Kind) -> None:
    """A save that is interrupted at any operation leaves the old directory or the new one, complete. It raises if and
    only if it leaves the old one."""
    outcomes, _ = run_processes(2, cut_off_at_each_operation, url, kind, 0, True)
    # Rank 0 puts its part and the extra file, removes the old copy and puts .metadata, on which it turns. Then it
    # makes the copy, and removes two parts and an extra file. The last of the saves was not disturbed.
    num_lost = 3 if kind == "answer lost" else 4
    assert outcomes == ["not there"] * num_lost + ["complete"] * (9 - num_lost)


def put_late(url: str) -> None:
    """The last of the four operations before a save is complete takes effect after its client has given up."""
    for at, found in ((3, 1), (0, 0)):
        place = RemoteDirectory(f"{url}/{at}")
        save(place, 0)
        assert save_cut_off_at(place, 1, "late", at, 0) == (True, True)
        dist.barrier()
        assert load(place) == found
        save(place, 2)
        dist.barrier()
        assert load(place) == 2
        assert_settled(place.url)


def test_a_put_that_was_given_up_and_comes_late_finds_all_that_it_names(url: str) -> None:
    run_processes(2, put_late, url)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["dead", "answer lost", "once"])
def test_a_first_save_is_complete_or_refused_by_name(url: str, kind: Kind) -> None:
    outcomes, _ = run_processes(2, cut_off_at_each_operation, url, kind, 0, False)
    num_lost = 2 if kind == "answer lost" else 3
    assert outcomes == ["not there"] * num_lost + ["complete"] * (len(outcomes) - num_lost)
    assert len(outcomes) == (6 if kind == "dead" else 5), "it may die once more, before it looks what to remove"


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["dead", "answer lost", "once"])
def test_a_rank_that_cannot_write_is_named_by_all(url: str, kind: Kind) -> None:
    """Without credentials, for one."""
    outcomes, _ = run_processes(2, cut_off_at_each_operation, url, kind, 1, True)
    assert outcomes == ["not there", "complete"], "it has its part to put"


def save_where_nobody_else_looks() -> str:
    with pytest.raises(CheckpointError) as raised:
        save(RemoteDirectory("memory://run/last.ckpt"), 1)
    assert not is_directory_checkpoint(RemoteDirectory("memory://run/last.ckpt"))
    return str(raised.value)


def test_a_rank_that_reaches_another_store_is_noticed_before_the_checkpoint_is_complete() -> None:
    """Processes have a memory:// each; so it is with another address, or another bucket of the same name."""
    for message in run_processes(2, save_where_nobody_else_looks):
        assert message.startswith("the checkpoint memory://run/last.ckpt was not written: rank 0: FileNotFoundError")
        assert "__1_0.distcp is missing, though its rank has written it" in message


# --- in the life of a place ------------------------------------------------------------------------------------------


def save_in_turns(folder: Path, url: str) -> None:
    place = RemoteDirectory(url)
    for number in range(3):
        save(place, number)
        assert load(place) == number, "whatever this rank has listed before"
        dist.barrier()
    if dist.get_rank() == 0:
        copy_to_disk(url, folder / "disk")
        copy_from_disk(folder / "disk", f"{url}-copied")
    dist.barrier()
    copied = RemoteDirectory(f"{url}-copied")
    assert load(copied) == 2
    save(copied, 3)
    dist.barrier()
    assert load(copied) == 3
    assert_settled(copied.url)


def test_ranks_see_what_is_there_now(tmp_path: Path, url: str) -> None:
    """fsspec remembers listings; another rank has written since."""
    run_processes(2, save_in_turns, tmp_path, url)
    assert_settled(url)


def save_where_lists_are_late(url: str) -> None:
    ObjectStore.lists_after_s = 3600.0
    place = RemoteDirectory(url)
    for number in range(2):
        save(place, number)
        assert load(place) == number
        dist.barrier()
    assert not place.sizes()
    ObjectStore.lists_after_s = 0.0
    save(place, 2)


def test_what_was_put_need_not_be_listed_yet(url: str) -> None:
    """Lists of some stores are late; they return an object by name as soon as it is put."""
    run_processes(2, save_where_lists_are_late, url)
    assert_settled(url)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["run [2]", "run*"])
def test_names_are_no_patterns(tmp_path: Path, name: str) -> None:
    url = f"objects://{tmp_path}/{name}/last.ckpt"
    run_processes(2, replace_and_remove, url)
    assert not objects_in(str(Path(url).parent))


def replace_and_remove(url: str) -> None:
    place = RemoteDirectory(url)
    for number in range(2):
        save(place, number)
        assert load(place) == number
        dist.barrier()
    if dist.get_rank() == 0:
        assert_settled(url)
        place.remove()


def replace_what_a_disk_had(folder: Path, url: str) -> None:
    """The extra file of such a directory has one name alone, and no part has the name of its save."""
    save_directory(state(0), {"number": 0}, folder / "disk", host_collectives())
    kinds: list[Kind] = ["dead", "once"]  # with the parts of what failed left there, and removed
    for kind, at in itertools.product(kinds, range(5)):
        place = RemoteDirectory(f"{url}/{kind}/{at}")
        if dist.get_rank() == 0:
            copy_from_disk(folder / "disk", place.url)
        dist.barrier()
        assert load(place) == 0
        assert save_cut_off_at(place, 1, kind, at, 0) == (True, True)
        dist.barrier()
        assert load(place) == 0


def test_a_directory_copied_from_a_disk_is_replaced_as_safely(tmp_path: Path, url: str) -> None:
    """Up to the fifth operation, one more than else: its extra file is copied first."""
    run_processes(2, replace_what_a_disk_had, tmp_path, url)


def refuse_to_replace(url: str) -> list[str]:
    messages = []
    for path, name in (("results", "results/precious.txt"), ("file.ckpt", "file.ckpt")):
        store = RemoteDirectory(url)
        if dist.get_rank() == 0:
            store.put(name, b"mine")
        dist.barrier()
        with pytest.raises(CheckpointError) as raised:
            save(RemoteDirectory(store.object(path)), 1)
        messages.append(str(raised.value))
    return messages


def test_what_is_no_checkpoint_is_not_replaced(url: str) -> None:
    for results, file in run_processes(2, refuse_to_replace, url):
        assert "rank 0: IsADirectoryError" in results
        assert "it is a directory, and no checkpoint" in results
        assert "it is a file, which a directory cannot replace at once" in file
    assert objects_in(url) == {"precious.txt", "file.ckpt"}


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
        assert place.kind() is None
        assert not objects_in(place.url)
        if not FAULTS.raised:
            return at
    raise AssertionError


def test_a_removal_that_is_cut_off_leaves_no_checkpoint(url: str) -> None:
    assert run_processes(1, remove_cut_off, url)[0] >= 4, "there are four objects"


# --- one process -----------------------------------------------------------------------------------------------------


def save_in_memory() -> None:
    place = RemoteDirectory("memory://run/last.ckpt")
    for number in range(2):
        save(place, number)
        assert load(place) == number
    assert place.kind() == "directory"
    place.remove()
    assert place.kind() is None


def test_one_process_saves_in_its_memory() -> None:
    run_processes(1, save_in_memory)


def count_requests(url: str) -> tuple[int, int]:
    module = nn.Sequential(*[nn.Linear(20, 20) for _ in range(100)])
    model = DistributedDataParallel(module)
    optimizer = DistributedOptimizer(torch.optim.AdamW(module.parameters()), model)
    model(torch.ones(2, 20)).sum().backward()
    optimizer.step()
    place, collectives = RemoteDirectory(url), host_collectives()
    save_directory({"model": module.state_dict(), "optimizer": optimizer.sharded_state_dict()}, {}, place, collectives)
    ObjectStore.requests = 0
    OpenDirectory(place).read("model")
    of_model, ObjectStore.requests = ObjectStore.requests, 0
    optimizer.load_sharded(url)
    return of_model, ObjectStore.requests


def test_reading_many_tensors_takes_few_requests(url: str) -> None:
    """The metadata, once, and the parts in blocks: not a request for each of 200 or 600 tensors."""
    for of_model, of_optimizer in run_processes(2, count_requests, url):
        assert of_model <= 1 + 2
        assert of_optimizer <= 1 + 2


# --- a store that is not ours ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.fresh
def test_so_it_is_in_s3(tmp_path: Path) -> None:
    """Or in what answers as it does: moto's server, by way of s3fs. 300 MB to install, and five minutes."""
    python = python_with(tmp_path, "s3fs", "moto[server,s3]", imports="s3fs")
    command = [python, "-m", "tests.doors.s3_runs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
