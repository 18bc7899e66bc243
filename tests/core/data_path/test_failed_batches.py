"""A forward or a backward that raises on one rank: all ranks drop the batch by name, and may go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.errors import BackwardFailedError
from tests.support.engines import engines
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.ranks import run_ranks, try_ranks

ENGINES = engines("reduce-scatter", "all-reduce", "flattened", "pooled", "forward", bucket_size=100)
CULPRIT = 1


class Fails(nn.Module):
    """Raises in its forward, or in its backward, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = two_layers()
        self.fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.layers[0](x))
        if self.fails_in == "forward":
            raise ArithmeticError("bad batch")
        if self.fails_in == "backward":
            hidden.register_hook(self.fail)
        out: Tensor = self.layers[2](hidden).square().mean()
        return out

    def fail(self, grad: Tensor) -> Tensor:
        raise ArithmeticError("bad batch")


def train(rank: int, group: ProcessGroup, options: dict[str, Any], fails_in: str, failing: tuple[int, ...]) -> Any:
    """Weights after the steps whose batch did not fail, and the messages of the others.

    Without ``fails_in`` these steps are left out."""
    module = Fails()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model)
    messages = []
    for step in range(5):
        if step in failing and not fails_in:
            continue
        module.fails_in = fails_in if step in failing and rank == CULPRIT else ""
        try:
            model(batch(rank, step)).backward()
        except ArithmeticError:
            assert rank == CULPRIT
            continue
        except BackwardFailedError as error:
            messages.append(str(error))
            continue
        if step not in failing:
            optimizer.step()
            optimizer.zero_grad()
    model.finish_param_gather()
    return [param.detach().clone() for param in module.parameters()], messages


@pytest.mark.parametrize(
    ("options", "failing", "fails_in"),
    [
        pytest.param(ENGINES["reduce-scatter"], (0,), "forward", id="reduce-scatter-(0,)-forward"),
        pytest.param(ENGINES["all-reduce"], (2,), "backward", id="all-reduce-(2,)-backward"),
        pytest.param(ENGINES["flattened"], (1, 2), "forward", id="flattened-(1, 2)-forward"),
        pytest.param(ENGINES["pooled"], (0,), "forward", id="pooled-(0,)-forward"),
        pytest.param(ENGINES["forward"], (0,), "forward", id="forward-(0,)-forward"),
    ],
)
def test_all_ranks_drop_the_batch_and_go_on(options: dict[str, Any], failing: tuple[int, ...], fails_in: str) -> None:
    ours = run_ranks(2, lambda rank, group: train(rank, group, options, fails_in, failing))
    reference = run_ranks(2, lambda rank, group: train(rank, group, options, "", failing)[0])
    for rank, (weights, messages) in enumerate(ours):
        assert all(map(torch.equal, weights, reference[rank]))
        assert len(messages) == (0 if rank == CULPRIT else len(failing))
        for message in messages:
            assert f"rank {CULPRIT}" in message
            assert "ArithmeticError: bad batch" in message or fails_in == "backward"


def test_uncaught_failure_ends_all_ranks() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = Fails()
        model = DistributedDataParallel(module, process_group=group)
        for step in range(3):
            module.fails_in = "forward" if (rank, step) == (CULPRIT, 1) else ""
            try:
                model(batch(rank, step)).backward()
            except ArithmeticError:
                model(batch(rank, step + 1)).backward()  # goes on, so that the others hear of it
                raise

    survivor, culprit = try_ranks(2, run, timeout_s=20.0)
    assert isinstance(culprit, ArithmeticError)
    assert isinstance(survivor, BackwardFailedError)
