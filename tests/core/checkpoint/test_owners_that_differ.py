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
from tests.support.ranks import run_ranks, try_ranks

LARGE = 1e6


class SGDWithPeaks(torch.optim.Optimizer):
    """Element-wise, as far as small gradients show: begins to keep the largest ones when it sees one that is large."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                param.add_(param.grad, alpha=-group["lr"])
                state = self.state[param]
                if (param.grad.abs() >= LARGE).any() or "peak" in state:
                    peak = state.setdefault("peak", torch.zeros_like(param))
                    peak.copy_(torch.maximum(peak, param.grad.abs()))


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


@pytest.mark.parametrize("holder", [0, 1])
def test_state_that_one_owner_alone_keeps_is_refused_on_all_ranks(holder: int) -> None:
    """torch DDP would have the other elements' state too, from gradients that no rank kept."""

    def run(rank: int, group: ProcessGroup) -> None:
        optimizer = one_weight(SGDWithPeaks, group)
        own = optimizer._impl.engine.layout.owned_range(0, holder)
        assert own is not None
        gradients = torch.ones(1, 96)
        gradients[0, own[0]] = LARGE
        step(optimizer, gradients)
        optimizer.state_dict()

    kept = {holder: "torch.float32", 1 - holder: "none"}
    message = rf"'peak' of parameter 'weight' differs between .*: rank 0: {kept[0]}; rank 1: {kept[1]}"
    for outcome in try_ranks(2, run):  # a rank that waited for the other would end in a CollectiveError
        assert isinstance(outcome, CheckpointError)
        with pytest.raises(CheckpointError, match=message):
            raise outcome
        way_out = "whole parameters: pass DistributedDataParallelConfig(use_distributed_optimizer=False)"
        assert str(outcome).endswith(way_out), "in the form in which the model was wrapped"


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
