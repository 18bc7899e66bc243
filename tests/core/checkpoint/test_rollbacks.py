"""The result of ``state_dict()`` on each rank is loaded again, from any container."""

from __future__ import annotations

import collections
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils import _pytree

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


def rebuilt(kind: Callable[[Any], Any]) -> Container:
    return lambda saved: {
        "state": kind(saved["state"]),
        "param_groups": [kind(group) for group in saved["param_groups"]],
    }


CONTAINERS: dict[str, Container] = {
    "as returned": lambda saved: saved,
    "dict": rebuilt(dict),
    "OrderedDict": rebuilt(collections.OrderedDict),
    "copy": rebuilt(copy.copy),
    "deepcopy": copy.deepcopy,
    "pickle": lambda saved: pickle.loads(pickle.dumps(saved)),
    "a file of each rank's own": through_a_file,
    "tree_map": lambda saved: _pytree.tree_map(lambda leaf: leaf, saved),
}


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("size", [2, 1])
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
def test_a_state_is_rolled_back_by_torchs_checkpoint_functions(sharded: bool) -> None:
    def roll_back(trainee: Trainee) -> None:
        trainee.step(2)
        saved = copy.deepcopy(get_optimizer_state_dict(trainee.module, trainee.optimizer))
        trainee.step(2)
        set_optimizer_state_dict(trainee.module, trainee.optimizer, saved)
        trainee.step(2)

    assert_like_torch_ddp(roll_back, adam, sharded=sharded)


@pytest.mark.parametrize("sharded", [True, False])
def test_an_empty_state_on_every_rank_is_forgotten_state(sharded: bool) -> None:
    def forget(trainee: Trainee) -> None:
        trainee.step(3)
        trainee.optimizer.load_state_dict({"state": {}, "param_groups": trainee.optimizer.state_dict()["param_groups"]})
        trainee.step(2)

    assert_like_torch_ddp(forget, adam, sharded=sharded)


def of_16_bit_weights(group: ProcessGroup) -> tuple[nn.Module, DistributedDataParallel, DistributedOptimizer]:
    module = two_layers().to(torch.bfloat16)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100), group)
    return module, model, DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=1e-4), model)


def test_main_params_are_rolled_back() -> None:
    """With 16-bit weights most of an update is in the main params: without them the rounding errors are lost."""

    def run(rank: int, group: ProcessGroup) -> None:
        module, model, optimizer = of_16_bit_weights(group)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 10, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()

        step()
        # A plain dict, so that a copy is one too: only its contents say that it is rank 0's.
        saved = dict(optimizer.state_dict()), dict(optimizer.main_params()), copy.deepcopy(module.state_dict())
        expected = optimizer.main_params()
        step()
        module.load_state_dict(saved[2])
        optimizer.load_state_dict(saved[0])
        optimizer.load_main_params(saved[1])
        again = optimizer.main_params()
        assert (rank == 0) == bool(expected)
        for name, value in expected.items():
            assert torch.equal(again[name], value), name
        for shard, state in optimizer.state.items():
            assert state["step"].item() == 1, shard.shape

    run_ranks(2, run)


@pytest.mark.parametrize("short_rank", [0, 1])
def test_a_state_that_lacks_entries_on_one_rank_is_refused_on_all(short_rank: int) -> None:
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
