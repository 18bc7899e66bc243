"""``Embedding(max_norm=)`` writes the rows that a rank looks up: refused where a shard has an owner."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.ranks import run_ranks


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], *, is_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = kind(6, 4, max_norm=0.5)
        self.words.requires_grad_(not is_frozen)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_renorm_in_forward_is_refused(kind: type[nn.Module]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(
            ValueError, match=r"'words' has max_norm=0\.5.*torch\.renorm.*use_distributed_optimizer=False"
        ):
            DistributedDataParallel(Net(kind), process_group=group)

    run_ranks(2, run)


def test_renorm_of_undivided_rows_trains() -> None:
    """With an all-reduce, on one rank, and frozen."""

    def run(rank: int, group: ProcessGroup, net: Net, *, shards: bool) -> None:
        config = DistributedDataParallelConfig(use_distributed_optimizer=shards)
        model = DistributedDataParallel(net, config, group)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = DistributedOptimizer(torch.optim.SGD(trained, lr=0.1), model)
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        assert net.words(torch.arange(6)).norm(dim=1).max() < 0.501

    run_ranks(2, lambda rank, group: run(rank, group, Net(nn.Embedding), shards=False))
    run_ranks(1, lambda rank, group: run(rank, group, Net(nn.Embedding), shards=True))
    run_ranks(2, lambda rank, group: run(rank, group, Net(nn.Embedding, is_frozen=True), shards=True))
