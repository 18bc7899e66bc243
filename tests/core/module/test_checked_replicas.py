"""``check_replicas_every_n_steps``: weights that have parted are named on all ranks, in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ReplicaMismatchError
from tests.support.engines import engines
from tests.support.models import two_layers
from tests.support.ranks import run_ranks, try_ranks

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")


def steps_until_noticed(group: ProcessGroup, rank: int, every: int, mode: str = "reduce-scatter") -> int:
    """The number of whole steps before the error, where rank 1 writes a weight alone after each; at most 9."""
    config = DistributedDataParallelConfig(bucket_size=100, check_replicas_every_n_steps=every, **MODES[mode])
    model = DistributedDataParallel(two_layers(), config, group)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(9):
        with torch.no_grad():
            model(torch.ones(2, 10))  # nor is a forward that does not train a step
        for microbatch in range(2):
            model.require_backward_grad_sync = microbatch == 1
            try:
                model(torch.ones(2, 10)).sum().backward()
            except ReplicaMismatchError as error:
                return step if "parameter '0.weight' has one value on data-parallel rank 0" in str(error) else -1
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1:  # each time, since a sharded step gathers what its owner has
            with torch.no_grad():
                model.module[0].weight[0, 0] += 1.0
    return 9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("every", [1, 3])
def test_all_ranks_raise_at_the_next_look(mode: str, every: int) -> None:
    def run(rank: int, group: ProcessGroup) -> int:
        return steps_until_noticed(group, rank, every, mode)

    # step 1 is the second: it begins with the look that step 0 made due
    assert run_ranks(3, run) == [every] * 3


def test_nobody_looks_who_did_not_ask() -> None:
    assert run_ranks(2, lambda rank, group: steps_until_noticed(group, rank, 0)) == [9, 9]


def test_one_rank_has_nobody_to_compare_with() -> None:
    def run(rank: int, group: ProcessGroup) -> int:
        return steps_until_noticed(group, 1, 1)

    assert run_ranks(1, run) == [9]


@pytest.mark.parametrize("value", [-1, 1.5, True, "500"])
def test_what_is_no_number_of_steps(value: Any) -> None:
    with pytest.raises(ValueError, match=r"check_replicas_every_n_steps=.*or 0 for never"):
        DistributedDataParallelConfig(check_replicas_every_n_steps=value)


def test_an_evaluation_between_ranks_costs_nothing() -> None:
    """Forwards that do not train are of one rank alone here: a look would wait for the others."""

    def run(rank: int, group: ProcessGroup) -> None:
        config = DistributedDataParallelConfig(check_replicas_every_n_steps=1)
        model = DistributedDataParallel(two_layers(), config, group)
        model(torch.ones(2, 10)).sum().backward()
        if rank == 0:
            with torch.no_grad():
                model(torch.ones(2, 10))

    assert try_ranks(2, run) == [None, None]
