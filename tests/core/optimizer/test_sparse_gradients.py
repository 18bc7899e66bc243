"""Sparse gradients are summed in dense buffers: any optimizer of dense gradients steps them, SparseAdam does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import OptimizerNotShardableError
from tests.support.ranks import run_ranks

both_modes = pytest.mark.parametrize("shards", [True, False], ids=["sharded", "whole"])


class Bag(nn.Module):
    """Sums rows of an embedding; each id comes many times in a batch."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 8, sparse=sparse), nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param, std=0.3, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(ids).sum(1)))


def wrapped(net: nn.Module, group: ProcessGroup, *, shards: bool) -> DistributedDataParallel:
    return DistributedDataParallel(net, DistributedDataParallelConfig(use_distributed_optimizer=shards), group)


def trained(make: Callable[[Any], Optimizer], *, sparse: bool, shards: bool | None = None) -> list[list[Tensor]]:
    """The weights by rank; under torch DDP without ``shards``."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        net = Bag(sparse=sparse)
        optimizer = make(net.parameters())
        model: Any = TorchDDP(net, process_group=group)
        if shards is not None:
            model = wrapped(net, group, shards=shards)
            optimizer = DistributedOptimizer(optimizer, model)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randint(0, 5, (4, 6), generator=generator)).square().mean().backward()
            optimizer.step()
        return [param.detach().clone() for param in net.parameters()]

    return run_ranks(2, run)


sgd = functools.partial(torch.optim.SGD, lr=0.05)
adam = functools.partial(torch.optim.Adam, lr=0.01)


def assert_same(mine: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(("make", "shards"), [(sgd, True), (adam, False)], ids=["SGD", "Adam"])
def test_sparse_gradients_train_as_dense_ones(make: Callable[[Any], Optimizer], shards: bool) -> None:
    assert_same(trained(make, sparse=True, shards=shards), trained(make, sparse=False))


@both_modes
def test_sparse_adam_is_refused_with_a_way_out(shards: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        net = Bag(sparse=True)
        model = wrapped(net, group, shards=shards)
        sparse = torch.optim.SparseAdam(list(net.embed.parameters()), lr=0.01)
        with pytest.raises(OptimizerNotShardableError, match=r"dense.*torch\.optim\.Adam") as raised:
            DistributedOptimizer(sparse, model)
        assert "use_distributed_optimizer" not in str(raised.value)
        optimizers = [
            DistributedOptimizer(torch.optim.Adam(net.embed.parameters(), lr=0.01), model),
            DistributedOptimizer(torch.optim.AdamW(net.out.parameters(), lr=0.01), model),
        ]
        before = net.embed.weight.detach().clone()
        model(torch.tensor([[1, 1, 2]])).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert not torch.equal(net.embed.weight, before)
        return [param.detach().clone() for param in net.parameters()]

    first, second = run_ranks(2, run)
    assert all(map(torch.equal, first, second))
