"""Directories that every rank writes its part of: any number of ranks reads them, and so does everybody else."""

from __future__ import annotations

import collections
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import CheckpointError, OpenDirectory, host_collectives, make_collectives, to_host
from megastrategy.core.states.flat_shard import FlatShard
from tests.support.models import images
from tests.support.processes import run_processes
from tests.support.sharded_training import Training, adamw, assert_same, lamb
from tests.support.whole_params import replicated_and_flat_groups

from .test_checkpoint_memory import AllocationWatch

# --- training, saved and gone on with --------------------------------------------------------------------------------


def write_and_read(folder: Path, dtype: torch.dtype, writer_sharded: bool, make: Any = adamw) -> None:
    """On three ranks: two write after three of six steps, and one, two and all read and train on."""
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    own = {size: make_collectives(groups[size], torch.device("cpu")) for size in groups if dist.get_rank() < size}
    path, saved, expected = folder / "checkpoint", {}, []
    if 2 in own:
        writer = Training(dtype, own[2], use_distributed_optimizer=writer_sharded, make=make)
        writer.train(range(3))
        save_directory(writer.state(), {"step": 3}, path, own[2])
        saved = writer.whole()
        expected = writer.train(range(3, 6))
        assert saved["optimizer"]["state"] or dist.get_rank() == 1
    dist.barrier()
    for size, collectives in own.items():
        for sharded in (True, False):
            reader = Training(dtype, collectives, use_distributed_optimizer=sharded, bucket_size=150, make=make)
            reader.load(path)
            loaded = reader.whole()
            if dist.get_rank() == 0:
                assert_same(loaded, saved, f"{size} ranks, sharded={sharded}")
            losses = reader.train(range(3, 6))
            assert size != 2 or losses == expected


@pytest.mark.parametrize(("writer_sharded", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_directories_resume_on_any_number_of_ranks(tmp_path: Path, writer_sharded: bool, dtype: torch.dtype) -> None:
    run_processes(3, write_and_read, tmp_path, dtype, writer_sharded)


@pytest.mark.parametrize(
    ("writer_sharded", "dtype", "make"),
    [(True, torch.float32, lamb), (True, torch.bfloat16, replicated_and_flat_groups)],
)
def test_whole_param_state_resumes_on_any_ranks(
    tmp_path: Path, writer_sharded: bool, dtype: torch.dtype, make: Any
) -> None:
    run_processes(3, write_and_read, tmp_path, dtype, writer_sharded, make)


class Peculiar(nn.Module):
    """Parameters that are called like a counter, and of one element and of none."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 0.5)))

    def forward(self, factor: float) -> Tensor:
        return torch.stack([param.square().sum() for param in self.parameters()]).sum() * factor


def resume_peculiar(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    finals = []
    for first in (0, 2):
        module = Peculiar(shapes)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=1))
        optimizer = DistributedOptimizer(torch.optim.NAdam(module.parameters(), lr=0.1), model)
        if first:
            module.load_state_dict(OpenDirectory(path).read("model"))
            optimizer.load_sharded(path)
        for step in range(first, 4):
            optimizer.zero_grad()
            model(1.0 + step).backward()
            optimizer.step()
            if (first, step) == (0, 1):
                state = {"model": module.state_dict(), "optimizer": optimizer.sharded_state_dict()}
                save_directory(state, {}, path, host_collectives())
        finals.append([param.detach().clone() for param in module.parameters()])
    for mine, expected in zip(*finals, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(
    "shapes", [{"step": (3,), "exp_avg": (65,), "none": (0, 4)}, {"step": (), "one": (1,), "row": (1, 1)}], ids=str
)
def test_peculiar_names_and_sizes_come_back(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    run_processes(2, resume_peculiar, tmp_path / "checkpoint", shapes)


def save_what_cannot_be_pickled(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        save_directory({"model": {"weight": torch.ones(3)}}, {"callback": lambda: None}, path, host_collectives())
    return str(raised.value)


def test_unpicklable_value_ends_the_save(tmp_path: Path) -> None:
    """Rank 0 writes it, and the others wait for what became of it."""
    for message in run_processes(2, save_what_cannot_be_pickled, tmp_path / "checkpoint", timeout_s=60.0):
        assert "was not written: rank 0: " in message
        assert "lambda" in message
    assert not list(tmp_path.iterdir())


def save_and_load_with_a_stranger(path: Path) -> None:
    """A head that is not the model's: its state parts from rank to rank, and rank 0's is saved."""
    rank = dist.get_rank()

    def make() -> tuple[Training, nn.Parameter]:
        training, head = Training(), nn.Parameter(torch.ones(3))
        training.optimizer.add_param_group({"params": [head], "lr": 0.1})
        return training, head

    first, head = make()
    for step in range(3):
        loss = first.model(images(rank, step, 0, first.dtype), step, rank)
        (loss + (head * (rank + 1)).square().sum()).backward()
        first.optimizer.step()
        first.optimizer.zero_grad()
    save_directory(first.state(), {}, path, host_collectives())
    saved = first.whole()
    second, its_head = make()
    second.load(path)
    if rank == 0:  # elsewhere the head's own state was in it
        assert_same(second.whole()["optimizer"], saved["optimizer"])
    else:
        second.whole()
    values = {name: value.clone() for name, value in second.optimizer.state[its_head].items()}
    from_rank_zero: list[Any] = [dict(first.optimizer.state[head])]
    dist.broadcast_object_list(from_rank_zero)
    assert_same(values, from_rank_zero[0])
    own = first.optimizer.state[head]["exp_avg"]
    assert torch.equal(own, values["exp_avg"]) == (rank == 0), "there is a difference to be seen"


def test_state_of_extra_param_is_that_of_rank_0(tmp_path: Path) -> None:
    run_processes(2, save_and_load_with_a_stranger, tmp_path / "checkpoint")


def test_host_copy_is_a_snapshot() -> None:
    Point = collections.namedtuple("Point", "x y")
    queue = collections.deque([1, 2], maxlen=3)
    state = {"queue": queue, "point": Point(1, torch.ones(2)), "by_name": collections.OrderedDict(a=[torch.zeros(1)])}
    copied = to_host(state)
    queue.append(3)
    state["by_name"]["a"][0] += 1
    state["point"].y.add_(1)
    assert copied["queue"] == collections.deque([1, 2], maxlen=3)
    assert type(copied["by_name"]) is collections.OrderedDict
    assert copied["by_name"]["a"][0].item() == 0
    assert copied["point"].y.tolist() == [1, 1]


# --- memory ----------------------------------------------------------------------------------------------------------


def save_watched(folder: Path) -> dict[str, int]:
    """The most bytes that saving and loading made, and what they are compared with."""
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)]))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    state = {"model": model.module.state_dict(), "optimizer": optimizer.sharded_state_dict()}
    collectives = host_collectives()
    shards = [value for values in state["optimizer"]["state"].values() for value in values.values()]
    found = {"shards": sum(value.local.nbytes for value in shards if isinstance(value, FlatShard))}
    with AllocationWatch() as watch:
        save_directory(state, {}, folder / "checkpoint", collectives)
        found["saving"] = watch.peak
    with AllocationWatch() as watch:
        copied = to_host(state)
        found["copied"] = watch.peak
    del copied
    with AllocationWatch() as watch:
        optimizer.load_sharded(folder / "checkpoint")
        found["loading"], found["kept"] = watch.peak, watch.alive
    return found


def test_directory_memory_is_two_tensors(tmp_path: Path) -> None:
    """The bytes of every storage that comes into being meanwhile, on each rank."""
    largest, weights = 4 * 300 * 300, 4 * 8 * (300 * 300 + 300)
    slack = 0.02 * largest
    for found in run_processes(2, save_watched, tmp_path):
        assert abs(found["shards"] - weights) <= 8 * 2 * 4 * 64 + 1024, "two moments of half the elements"
        assert found["saving"] <= 2 * largest + slack, "one that is written, and the next"
        assert found["copied"] <= found["shards"] + weights + slack
        assert found["kept"] <= found["shards"] + slack
        assert found["loading"] <= found["shards"] + 2 * largest + slack


# --- asynchronous ----------------------------------------------------------------------------------------------------


def save_both_ways(synchronous: Path, asynchronous: Path) -> None:
    training = Training()
    training.train(range(2))
    save_directory(training.state(), {}, synchronous, host_collectives())
    group = dist.new_group(backend="gloo")
    pending = dcp.async_save(training.state(), checkpoint_id=asynchronous, process_group=group)
    training.train(range(2, 5))  # changes everything that is being saved
    pending.result()


def test_asynchronous_save_is_equal(tmp_path: Path) -> None:
    run_processes(2, save_both_ways, tmp_path / "synchronous", tmp_path / "asynchronous")
    for key in ("model", "optimizer"):
        assert_same(*(OpenDirectory(tmp_path / name).read(key) for name in ("asynchronous", "synchronous")))


# --- what can go wrong -----------------------------------------------------------------------------------------------


def replace_twice(path: Path) -> None:
    training = Training()
    collectives = host_collectives()
    for steps in (range(1), range(1, 2)):
        training.train(steps)
        save_directory(training.state(), {"step": steps.stop}, path, collectives)
    assert torch.load(path / "meta.pt") == {"step": 2}
    training.load(path)


@pytest.mark.parametrize("before", ["nothing", "file"])
def test_a_save_replaces_what_was_there(tmp_path: Path, before: str) -> None:
    if before == "file":
        (tmp_path / "last.ckpt").write_text("an older checkpoint")
    run_processes(2, replace_twice, tmp_path / "last.ckpt")
    assert [child.name for child in tmp_path.iterdir()] == ["last.ckpt"]


def load_strange(path: Path) -> None:
    training = Training()
    before = training.whole()
    rows = nn.Linear(3, 3)
    strange = {
        "missing": "no complete directory",
        "truncated": r"is not complete: __0_0.distcp is cut off after 1,000 of .* bytes",
        "other_model": r"state '.*' of a parameter 'weight', which the model does not have",
        "other_shape": r"state '.*' of parameter 'embedding.weight' in shape \(3, 3\), the parameter has \(17, 13\)",
        "other_groups": r"parameter 'norm.weight' is in group 1 of the optimizer, but not of .*other_groups",
    }
    if dist.get_rank() == 0:
        good = training.optimizer.sharded_state_dict()
        no_dist = {"no_dist": True}
        state = {"weight": {"exp_avg": rows.weight.detach()}}
        dcp.save({"optimizer": good | {"state": state}}, checkpoint_id=path / "other_model", **no_dist)
        state = {"embedding.weight": {"exp_avg": rows.weight.detach()}}
        dcp.save({"optimizer": good | {"state": state}}, checkpoint_id=path / "other_shape", **no_dist)
        groups = [dict(group) for group in good["param_groups"]]
        groups[1]["params"] = [name for name in groups[1]["params"] if name != "norm.weight"]
        dcp.save({"optimizer": {"param_groups": groups}}, checkpoint_id=path / "other_groups", **no_dist)
        dcp.save(
            {"optimizer": good, "model": training.module.state_dict()}, checkpoint_id=path / "truncated", **no_dist
        )
        [file] = (path / "truncated").glob("*.distcp")
        file.write_bytes(file.read_bytes()[:1000])
    dist.barrier()
    for name, message in strange.items():
        with pytest.raises(CheckpointError, match=message):
            training.optimizer.load_sharded(path / name)
    with pytest.raises(CheckpointError, match="no optimizer under the key 'other'"):
        training.optimizer.load_sharded(path / "other_groups", "other")
    assert_same(training.whole(), before)


def test_unfit_directory_is_refused(tmp_path: Path) -> None:
    run_processes(2, load_strange, tmp_path)


# Ranks that have no folder in common write their parts apart, and the union of their folders is the checkpoint.


def write(folder: str, *, in_the_way: bool = False) -> tuple[dict[str, torch.Tensor], str]:
    """The model and the first moments as in a whole save, and the exception."""
    torch.manual_seed(0)
    net = nn.Linear(7, 5)
    model = DistributedDataParallel(net)
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters()), model)
    for _ in range(3):
        model(torch.ones(2, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rank = torch.distributed.get_rank()
    path = Path(folder) / f"rank {rank}" / "checkpoint"
    if in_the_way and rank == 1:
        path.mkdir(parents=True)
        (path / "notes").write_text("of the user")
    state = {"model": net.state_dict(), "optimizer": optimizer.sharded_state_dict()}
    said = ""
    try:
        save_directory(state, {"step": 3}, path, host_collectives(), is_apart=True)
    except CheckpointError as error:
        said = str(error)
    names = dict(enumerate(name for name, _ in net.named_parameters()))
    whole = {f"moment {names[index]}": values["exp_avg"] for index, values in optimizer.state_dict()["state"].items()}
    return {**whole, **net.state_dict()}, said


def test_union_of_rank_folders_is_whole(tmp_path: Path) -> None:
    (whole, said), (_, said_there) = run_processes(2, write, str(tmp_path))
    assert said == said_there == ""
    parts = [{path.name for path in (tmp_path / f"rank {rank}" / "checkpoint").iterdir()} for rank in range(2)]
    assert parts == [{"__0_0.distcp", ".metadata", "meta.pt"}, {"__1_0.distcp"}]
    assert [len(list((tmp_path / f"rank {rank}").iterdir())) for rank in range(2)] == [1, 1], "nothing is left beside"
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        OpenDirectory(tmp_path / "rank 0" / "checkpoint").read("optimizer")
    for rank in range(2):
        shutil.copytree(tmp_path / f"rank {rank}" / "checkpoint", tmp_path / "union", dirs_exist_ok=True)
    moments = OpenDirectory(tmp_path / "union").read("optimizer")["state"]
    read = {f"moment {name}": values["exp_avg"] for name, values in moments.items()}
    read |= OpenDirectory(tmp_path / "union").read("model")
    assert read.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(read[name], value, rtol=0, atol=0)


def test_a_rank_that_cannot_write_is_named_by_all(tmp_path: Path) -> None:
    outcomes = run_processes(2, write_where_something_is, str(tmp_path))
    for _, said in outcomes:
        assert "rank 1: IsADirectoryError" in said
    assert (tmp_path / "rank 1" / "checkpoint" / "notes").read_text() == "of the user"
    assert not (tmp_path / "rank 0" / "checkpoint").exists()


def write_where_something_is(folder: str) -> tuple[dict[str, torch.Tensor], str]:
    return write(folder, in_the_way=True)
