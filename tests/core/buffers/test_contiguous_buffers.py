"""The memory of a bucket keeps old values, and no later gradient has any of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.ranks import run_ranks

MODES: dict[str, dict[str, Any]] = {
    "scattered": {},
    "all-reduce": {"use_distributed_optimizer": False},
    "rounded": {"grad_wire_dtype": "bf16"},
}
X = torch.ones(3, 20)


class TwoLayers(nn.Module):
    """Two layers; the second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, x: Tensor, uses_second: bool = True) -> Tensor:
        x = self.first(x)
        return (self.second(x) if uses_second else x).sum()


def wrap(group: ProcessGroup, **options: Any) -> tuple[TwoLayers, DistributedDataParallel, DistributedOptimizer]:
    module = TwoLayers()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=500, **options), group)
    return module, model, DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.0), model)


@pytest.mark.parametrize("mode", MODES)
def test_old_values_of_a_view_are_in_no_later_gradient(mode: str) -> None:
    """A layer that one rank leaves out adds nothing there, and one that all leave out has no gradient."""

    def run(rank: int, group: ProcessGroup) -> None:
        module, model, optimizer = wrap(group, **MODES[mode])
        model(X).backward()
        whole = model.full_grad(module.second.weight)
        assert whole is not None
        assert whole.any()
        optimizer.zero_grad()
        model(X, rank == 0).backward()
        half = model.full_grad(module.second.weight)
        assert half is not None
        assert torch.equal(half, whole / 2)
        optimizer.zero_grad()
        model(X, False).backward()
        assert model.full_grad(module.second.weight) is None
        model.close()

    run_ranks(2, run)


def test_microbatches_are_added_to_the_first_grad() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module, model, optimizer = wrap(group)
        model(X).backward()
        once = model.full_grad(module.second.weight)
        assert once is not None
        for _ in range(2):
            optimizer.zero_grad()
            for uses_second in (False, True, False):
                with model.no_sync():
                    model(X, uses_second).backward()
            model(X).backward()
            twice = model.full_grad(module.second.weight)
            assert twice is not None
            assert torch.equal(twice, 2 * once)
        model.close()

    run_ranks(2, run)
