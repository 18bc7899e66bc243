"""A learning rate that differs between ranks is named on all ranks, at the first synchronised backward after a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import LayoutMismatchError
from tests.support.engines import engines
from tests.support.ranks import run_ranks

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")


@pytest.mark.parametrize(
    ("options", "size"),
    [
        pytest.param(MODES["reduce-scatter"], 2, id="reduce-scatter-2"),
        pytest.param(MODES["pooled"], 2, id="pooled-2"),
        pytest.param(MODES["forward"], 2, id="forward-2"),
        pytest.param(MODES["all-reduce"], 3, id="all-reduce-3"),
    ],
)
def test_rank_local_rate_raises(options: dict[str, Any], size: int) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(nn.Linear(8, 4), DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), model)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
            optimizer.step()

        step()
        optimizer.param_groups[0]["lr"] = 0.125  # alike
        step()
        if rank == 1:
            optimizer.param_groups[0]["lr"] = 0.0625
        step()
        with pytest.raises(LayoutMismatchError, match=r"(?s)rank 0: \[0\.125, .*rank 1: \[0\.0625, .*ReduceLROn"):
            step()

    run_ranks(size, run)


@pytest.mark.parametrize(
    ("option", "by_rank"),
    [("betas", [(0.9, 0.99), (0.9, 0.95)]), ("lr", [torch.tensor(0.25), torch.tensor(0.125)])],
    ids=["betas", "rate-as-a-tensor"],
)
def test_rank_local_option_raises(option: str, by_rank: list[Any]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(nn.Linear(8, 4), process_group=group)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.25), model)
        optimizer.param_groups[0][option] = by_rank[rank]
        model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        with pytest.raises(LayoutMismatchError, match="stepped with different options"):
            model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()

    run_ranks(2, run)


def test_option_nan_on_all_ranks_is_equal() -> None:
    """Each NaN has a hash of its own."""

    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(nn.Linear(8, 4), process_group=group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), model)
        for rate in (0.25, float("nan"), 0.25):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
            optimizer.step()

    run_ranks(2, run)
