"""Weights in shared memory stay there, so that other processes read every step, as under torch DDP."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.engines import all_options, both_numbers_of_ranks
from tests.support.ranks import run_ranks


class Net(nn.Module):
    """The LSTM's weights are in one chunk, and BatchNorm has module buffers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.cells, self.norm, self.out = nn.LSTM(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        for param in self.parameters():
            nn.init.normal_(param, std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.cells(x)[0]))


def shared_part(module: nn.Module) -> list[Tensor]:
    """Returns the memory that other processes have: tensors that no wrapper knows."""
    return [tensor.detach().view(-1) for tensor in (*module.parameters(), *module.buffers())]


def seen_by_readers(
    size: int, options: dict[str, Any] | None, *, share_at: int, dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """Trains, and returns by rank the values in shared memory after each step, and the weights at the end.

    ``options``: None for torch DDP. ``share_at``: the step before which the module is shared; -1 for before the wrap.
    """

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        net = Net().to(dtype)
        if share_at < 0:
            net.share_memory()
        shared, found = shared_part(net) if share_at < 0 else [], list[Tensor]()
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
        if options is None:
            model: Any = TorchDDP(net, process_group=group)
        else:
            model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), group)
            optimizer = DistributedOptimizer(optimizer, model)
        for step in range(4):
            if step == share_at:
                model.zero_grad()
                model.share_memory()
                shared = shared_part(net)
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            found += [tensor.clone() for tensor in shared]
            if shared:
                assert all(tensor.is_shared() for tensor in (*net.parameters(), *net.buffers()))
                assert all(map(torch.equal, shared, shared_part(net)))
        if options is not None:
            model.close()
        assert all(tensor.is_shared() for tensor in (*net.parameters(), *net.buffers()))
        return found + [param.detach().clone() for param in net.parameters()]

    return run_ranks(size, run)


@functools.cache
def seen_under_torch_ddp(size: int, share_at: int) -> list[list[Tensor]]:
    return seen_by_readers(size, None, share_at=share_at)


@all_options
@both_numbers_of_ranks
@pytest.mark.parametrize("share_at", [-1, 0, 2], ids=["before the wrap", "after it", "in training"])
def test_readers_see_every_step(size: int, options: dict[str, Any], share_at: int) -> None:
    theirs = seen_under_torch_ddp(size, share_at)
    for mine, reference in zip(seen_by_readers(size, options, share_at=share_at), theirs, strict=True):
        assert len(mine) == len(reference)
        assert all(map(torch.equal, mine, reference))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"param_wire_dtype": "bf16"}, {"overlap_param_gather": "forward"}],
    ids=str,
)
def test_weights_of_16_bits_are_read_as_they_are_trained(options: dict[str, Any]) -> None:
    dtype = torch.float32 if "param_wire_dtype" in options else torch.bfloat16
    options = {"bucket_size": 100, **options}
    unshared = [found[-9:] for found in seen_by_readers(2, options, share_at=3, dtype=dtype)]
    for mine, reference in zip(seen_by_readers(2, options, share_at=-1, dtype=dtype), unshared, strict=True):
        assert all(map(torch.equal, mine[-9:], reference))


def test_training_uses_values_that_another_process_writes() -> None:
    """As in a lock-free search: an actor's write between two steps is neither lost nor overwritten."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        net = Net().share_memory()
        shared = [param.detach().view(-1) for param in net.parameters()]
        model = DistributedDataParallel(net, DistributedDataParallelConfig(bucket_size=100), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            for tensor in shared:
                tensor.add_(1.0)
            optimizer.step()
        model.close()
        return [param.detach().clone() for param in net.parameters()]

    expected = [param.detach() + 1.0 + 1.0 for param in Net().parameters()]
    for found in run_ranks(2, run):
        assert all(map(torch.equal, found, expected))
