"""Rounded changes of weights where an optimizer that steps whole parameters comes into a run that is under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.doubles import RecordingCollectives
from tests.support.models import two_layers
from tests.support.optimizers import MatricesAndRest
from tests.support.ranks import run_ranks

BOTH = {"grad_wire_dtype": "bf16", "param_wire_dtype": "bf16"}
EIGHT = {"grad_wire_dtype": "int8", "param_wire_dtype": "int8"}


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 10, generator=torch.Generator().manual_seed(1000 * rank + step))


@pytest.mark.parametrize("wire", [BOTH, EIGHT, {**BOTH, "overlap_param_gather": "forward"}])
@pytest.mark.parametrize("size", [2, 3])
def test_changes_that_came_before_a_bucket_had_owners_are_not_added_once_more(size: int, wire: dict[str, Any]) -> None:
    """The optimizer of the matrices comes later, as after unfreezing, and steps before the one that was there."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        config = DistributedDataParallelConfig(bucket_size=10**9, **wire)
        module, collectives = two_layers(), RecordingCollectives(group)
        model = DistributedDataParallel(module, config, collectives=collectives)
        params = list(model.parameters())
        rest = DistributedOptimizer(torch.optim.AdamW([p for p in params if p.dim() < 2], lr=0.05), model)
        optimizers, seen = [rest], []
        for step in range(6):
            if step == 3:
                groups = [{"params": [p for p in params if p.dim() > 1], "by_row": True}]
                optimizers.insert(0, DistributedOptimizer(MatricesAndRest(groups), model))
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.finish_param_gather()
            seen += [param.detach().clone() for param in module.parameters()]
        model.close()
        return seen

    by_rank = run_ranks(size, run)
    for others in by_rank[1:]:
        assert all(map(torch.equal, by_rank[0], others)), "every rank has the same weights after every step"
