"""The result of ``state_dict()`` on each rank is loaded again, from any container."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import CheckpointError
from tests.support.models import two_layers
from tests.support.programs import Trainee, assert_like_torch_ddp
from tests.support.ranks import run_ranks

Container = Callable[[dict[str, Any]], Any]


def through_a_file(saved: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def copied(saved: dict[str, Any]) -> Any:
    """Makes new containers around the tensors."""
    return {"state": copy.copy(saved["state"]), "param_groups": [copy.copy(group) for group in saved["param_groups"]]}


def as_returned(saved: dict[str, Any]) -> Any:
    return saved


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


@pytest.mark.parametrize(
    ("container", "sharded", "size"),
    [(as_returned, True, 2), (copied, True, 2), (through_a_file, True, 2), (through_a_file, False, 2)],
)
def test_a_state_is_rolled_back(container: Container, sharded: bool, size: int) -> None:
    def roll_back(trainee: Trainee) -> None:
        trainee.step(2)
        # torch's has the optimizer's own tensors
        saved = container(copy.deepcopy(trainee.optimizer.state_dict()))
        trainee.step(2)
        trainee.optimizer.load_state_dict(saved)
        trainee.step(2)

    assert_like_torch_ddp(roll_back, adam, size, sharded=sharded)


@pytest.mark.parametrize("sharded", [True, False])
def test_empty_state_on_every_rank_is_forgotten(sharded: bool) -> None:
    def forget(trainee: Trainee) -> None:
        trainee.step(3)
        trainee.optimizer.load_state_dict({"state": {}, "param_groups": trainee.optimizer.state_dict()["param_groups"]})
        trainee.step(2)

    assert_like_torch_ddp(forget, adam, sharded=sharded)


@pytest.mark.parametrize("short_rank", [0, 1])
def test_state_lacking_entries_on_one_rank_is_refused(short_rank: int) -> None:
    def run(rank: int, group: ProcessGroup) -> str:
        module = two_layers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100), group)
        optimizer = DistributedOptimizer(torch.optim.AdamW(module.parameters()), model)
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        saved = [optimizer.state_dict()]
        torch.manual_seed(0)
        state = {number: {"step": torch.tensor(5.0)} for number in range(4)}
        if rank == short_rank:
            del state[2]
        before = {key: {**value} for key, value in optimizer.optimizer.state.items()}
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict({"state": state, "param_groups": saved[0]["param_groups"]})
        assert optimizer.optimizer.state == before
        return str(caught.value)

    there = 1 - short_rank
    for message in run_ranks(2, run):
        assert f"an entry for parameter 2 on rank {there} and none on rank {short_rank}" in message
