"""num_distributed_optimizer_instances on real process groups: training, directories, and what ends with the engine."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.directories import written_by
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, host_collectives
from megastrategy.core.states.flat_shard import FlatShard
from tests.support.models import two_layers
from tests.support.processes import run_processes
from tests.support.sharded_training import Training, assert_same

WAYS: dict[str, dict[str, Any]] = {
    "two instances": {"num_distributed_optimizer_instances": 2},
    "one instance": {},
    "all-reduce": {"use_distributed_optimizer": False},
}


def check_every_element_is_there_once(path: Path) -> None:
    """By what the directory says of itself: no chunk twice, and as many elements as there are."""
    metadata = OpenDirectory(path).metadata
    places = collections.Counter((index.fqn, index.offset) for index in metadata.storage_data)
    assert max(places.values()) == 1
    for name, saved in metadata.state_dict_metadata.items():
        if hasattr(saved, "chunks"):
            assert sum(math.prod(chunk.sizes) for chunk in saved.chunks) == math.prod(saved.size), name
            stored = {index.offset for index in metadata.storage_data if index.fqn == name}
            assert stored == {chunk.offsets for chunk in saved.chunks}, name


def save_in_one_way_and_load_in_another(folder: Path, dtype: torch.dtype, writer: str, reader: str) -> None:
    writing = Training(dtype, **WAYS[writer])
    writing.train(range(3))
    path = folder / "checkpoint"
    state = writing.state()
    if writer == "two instances":
        held = [v for values in state["optimizer"]["state"].values() for v in values.values()]
        assert any(isinstance(value, FlatShard) for value in held), "the ranks write their parts"
    state["model"] = written_by(state["model"], writing.module, dist.get_rank() == 0)
    save_directory(state, {"step": 3}, path, host_collectives())
    if dist.get_rank() == 0:
        check_every_element_is_there_once(path)
    saved = writing.whole()
    reading = Training(dtype, bucket_size=150, **WAYS[reader])
    reading.load(path)
    loaded = reading.whole()
    if dist.get_rank() == 0:
        assert_same(loaded, saved)
    reading.train(range(3, 4))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("two instances", "two instances"),
        ("two instances", "one instance"),
        ("two instances", "all-reduce"),
        ("one instance", "two instances"),
        ("all-reduce", "two instances"),
    ],
)
def test_a_directory_has_every_element_once_and_is_read_in_every_way(
    tmp_path: Path, writer: str, reader: str, dtype: torch.dtype
) -> None:
    run_processes(4, save_in_one_way_and_load_in_another, tmp_path, dtype, writer, reader)


# --- groups ----------------------------------------------------------------------------------------------------------


def train(model: Any, optimizer: Any, module: torch.nn.Module) -> Tensor:
    rank = dist.get_rank()
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * rank + step))
        model(x).square().sum().backward()
        optimizer.step()
    return torch.cat([param.detach().reshape(-1) for param in module.parameters()])


def train_on(group: dist.ProcessGroup | None, num_instances: int) -> Tensor:
    """Compares with torch DDP, and looks for groups that are left."""
    if dist.get_rank() == 0:  # in one more group than others are
        dist.new_group([0], use_local_synchronization=True)
    reference, module = two_layers(), two_layers()
    ddp = TorchDDP(reference, process_group=group)
    expected = train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9), reference)
    for _ in range(2):  # closed, and made again
        before = len(dist.distributed_c10d._world.pg_map)
        module = two_layers()
        config = DistributedDataParallelConfig(num_distributed_optimizer_instances=num_instances, bucket_size=100)
        model = DistributedDataParallel(module, config, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)
        made, place = [model.engine.collectives.group], model.engine.collectives.rank
        assert dist.get_process_group_ranks(made[0]) == [0, 1, 2, 3]
        if num_instances == 2:
            made += [model.engine.shard_collectives.group, model.engine.shard_collectives.across.group]
            assert dist.get_process_group_ranks(made[1]) == [place - place % 2, place - place % 2 + 1]
            assert dist.get_process_group_ranks(made[2]) == [place % 2, place % 2 + 2]
        assert len(dist.distributed_c10d._world.pg_map) == before + len(made)
        for part in made:
            timeouts = [g._get_backend(torch.device("cpu")).options._timeout for g in (part, group or dist.group.WORLD)]
            assert timeouts[0] == timeouts[1]
        seen = train(model, optimizer, module)
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-6)
        state = optimizer.state_dict()["state"]
        assert bool(state) == (place == 0)
        model.close()
        optimizer.optimizer.state_dict()  # gathers the state, and ends the groups
        assert len(dist.distributed_c10d._world.pg_map) == before
    return seen


def train_on_all(num_instances: int) -> Tensor:
    return train_on(None, num_instances)


def train_on_some(num_instances: int) -> Tensor | None:
    """The first four of five ranks; the last takes no part in making the groups."""
    group = dist.new_group([0, 1, 2, 3])
    return train_on(group, num_instances) if dist.get_rank() < 4 else None


@pytest.mark.parametrize("num_instances", [1, 2])
@pytest.mark.parametrize("size", [4, 5])
def test_groups_are_made_of_the_engines_own_and_end_with_it(size: int, num_instances: int) -> None:
    """Twice in a process, on all ranks and on some. One rank is in more groups than the others."""
    outcomes = run_processes(size, train_on_all if size == 4 else train_on_some, num_instances)
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes[:4])
