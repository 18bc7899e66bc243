"""Parameters in shared memory, which other processes may read, are refused where they would move into a buffer."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ParameterChangedError
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


def test_wrap_refuses_shared_parameters() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers().share_memory()
        with pytest.raises(ValueError, match=r"'0\.weight' is in shared memory.*use_distributed_optimizer=False"):
            DistributedDataParallel(module, process_group=group)

    run_ranks(2, run)


def test_parameters_that_are_shared_later_are_refused() -> None:
    """Before the first backward, at whose end they move into the buffer, and after it."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, process_group=group)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
        shared = module[0].weight.data.clone().share_memory_()
        before = module[0].weight.data
        module[0].weight.data = shared
        with pytest.raises(ValueError, match=r"'0\.weight' is in shared memory"):
            model(torch.ones(2, 10))
        module[0].weight.data = before
        model(torch.ones(2, 10)).sum().backward()
        module.share_memory()
        with pytest.raises(ParameterChangedError, match=r"'0\.weight' was moved into shared memory"):
            optimizer.step()

    run_ranks(2, run)


def test_all_reduce_leaves_parameters_shared() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers().share_memory()
        shared = [param.detach() for param in module.parameters()]
        config = DistributedDataParallelConfig(use_distributed_optimizer=False)
        model = DistributedDataParallel(module, config, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        for param, tensor in zip(module.parameters(), shared, strict=True):
            assert param.data_ptr() == tensor.data_ptr()
            assert param.is_shared()

    run_ranks(2, run)
