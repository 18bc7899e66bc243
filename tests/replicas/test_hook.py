"""The hook of replicas, without torchft: what the others say decides which gradients there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


class Others:
    """The other replicas, which use no parameter, and whose gradients are zeros."""

    def begin(self) -> None:
        pass

    def reduce(self, shard: Tensor) -> None:
        shard.zero_()

    def any_of(self, flags: bytes) -> bytes:
        return bytes(len(flags))

    def commit(self, *, is_refused: bool) -> bool:
        return not is_refused


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_distributed_optimizer": False},
        {"use_distributed_optimizer": False, "use_contiguous_buffers": False, "overlap_grad_reduce": False},
        {"grad_buffer": "pooled"},
    ],
    ids=["shards", "all-reduce", "flattened", "pooled"],
)
def test_grad_of_replica_without_part_is_dropped(options: dict[str, Any]) -> None:
    """With zeros instead, momentum would be applied where the others have no gradient."""

    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), DistributedDataParallelConfig(**options), group)
        model.set_replica_hook(Others())
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), model)
        before = [param.detach().clone() for param in model.parameters()]
        for _ in range(2):
            model(torch.full((2, 10), 1.0 + rank)).sum().backward()
            assert all(param.grad is None for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, before, model.parameters()))

    run_ranks(2, run)
