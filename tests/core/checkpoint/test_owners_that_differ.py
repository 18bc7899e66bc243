"""Owners of parts of one parameter that keep different state: all ranks raise, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.core.errors import CheckpointError
from tests.support.ranks import run_ranks


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
