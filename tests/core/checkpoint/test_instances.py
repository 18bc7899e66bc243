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

from megastrategy._checkpoints.directories import written_by
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, host_collectives
from megastrategy.core.states.flat_shard import FlatShard
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


@pytest.mark.parametrize(
    ("writer", "reader", "dtype"),
    [("two instances", "two instances", torch.float32), ("two instances", "all-reduce", torch.float32)],
)
def test_directory_of_instances_has_every_element_once(
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
