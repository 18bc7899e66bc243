"""The result of ``state_dict()`` on each rank is loaded again, from any container."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


# Owners of parts of one parameter that keep different state: all ranks raise, and none waits for another.


def one_weight(make: Callable[[Any], torch.optim.Optimizer], group: ProcessGroup | None) -> DistributedOptimizer:
    """A weight of 96 elements, a part on each of two ranks; the model lives as long as the optimizer."""
    module = nn.Linear(96, 1, bias=False)
    model = DistributedDataParallel(module, process_group=group)
    return DistributedOptimizer(make(module.parameters()), model, sharding="flat")


def step(optimizer: DistributedOptimizer, gradients: Tensor) -> None:
    model = optimizer._impl.engine.module
    (model.weight * gradients).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def own_state(optimizer: DistributedOptimizer) -> dict[str, Any]:
    [state] = optimizer.state.values()
    return state  # type: ignore[no-any-return]


def in_double(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].double()


def whole(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.zeros(())


def in_blocks(state: dict[str, Any]) -> None:
    state["scales"] = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda state: state.update(count=3),
            r"'count' of parameter 'weight' differs .*: rank 0: none; rank 1: one value",
        ),
        (dict.clear, r"'step' of parameter 'weight' differs .*: rank 0: one value; rank 1: none"),
        (in_double, r"'exp_avg' of parameter 'weight' differs .* rank 0: torch.float32; rank 1: torch.float64"),
        (whole, r"'exp_avg' of parameter 'weight' differs .* rank 0: torch.float32; rank 1: one value"),
        (in_blocks, r"rank 1: the optimizer keeps state 'scales' of shape \(2,\)"),
    ],
    ids=["a count", "nothing", "another dtype", "a count for all elements", "what cannot be saved"],
)
def test_what_differs_is_named_on_all_ranks(change: Callable[[dict[str, Any]], None], says: str) -> None:
    """As when only one rank loaded a state, or user code wrote into it."""

    def run(rank: int, group: ProcessGroup) -> None:
        optimizer = one_weight(torch.optim.Adam, group)
        step(optimizer, torch.ones(1, 96))
        if rank == 1:
            change(own_state(optimizer))
        with pytest.raises(CheckpointError, match=says):
            optimizer.state_dict()

    run_ranks(2, run)
