"""``model.check_replicas()``: weights that have diverged are named on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ReplicaMismatchError
from tests.support.engines import engines
from tests.support.models import two_layers
from tests.support.ranks import run_ranks

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")


def check_before_and_after_a_write(group: ProcessGroup, rank: int, mode: str) -> str:
    config = DistributedDataParallelConfig(bucket_size=100, **MODES[mode])
    model = DistributedDataParallel(two_layers(), config, group)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    model.check_replicas()
    if rank == 1:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1.0
    try:
        model.check_replicas()
    except ReplicaMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_raise_with_the_first_parameter(mode: str) -> None:
    found = run_ranks(3, lambda rank, group: check_before_and_after_a_write(group, rank, mode))
    assert all("parameter '0.weight' has one value on data-parallel rank 0" in error for error in found)


def test_one_rank_compares_with_no_other() -> None:
    assert run_ranks(1, lambda rank, group: check_before_and_after_a_write(group, 1, "reduce-scatter")) == [""]
