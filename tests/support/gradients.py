"""Collects what a few forwards and backwards leave in ``.grad``, under torch DDP and under ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig
from megastrategy.core.errors import ReducedGradError

from .ranks import run_ranks

Scenario = Callable[[Any, int], None]
"""Runs forwards and backwards on a wrapped model, on a rank."""

ENGINES = [
    {"use_distributed_optimizer": True, "bucket_size": 1},
    {"use_distributed_optimizer": True, "bucket_size": 10**9, "overlap_grad_reduce": False},
    {"use_distributed_optimizer": False, "bucket_size": 1},
    {"use_distributed_optimizer": False, "use_contiguous_buffers": False, "overlap_grad_reduce": False},
    {"use_distributed_optimizer": True, "bucket_size": 1, "grad_buffer": "pooled"},
]
ENGINE_IDS = ["sharded", "sharded_late", "all_reduce", "flattened", "pooled"]


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * rank + number))


def grads_with_ddp(make: Callable[[], nn.Module], scenario: Scenario, size: int = 2, **options: Any) -> list[list[Any]]:
    def run(rank: int, group: ProcessGroup) -> list[Any]:
        module = make()
        scenario(TorchDDP(module, process_group=group, **options), rank)
        return [None if param.grad is None else param.grad.clone() for param in module.parameters()]

    return run_ranks(size, run)


def grads_with_ours(
    make: Callable[[], nn.Module], scenario: Scenario, size: int = 2, **options: Any
) -> list[list[Any]]:
    def run(rank: int, group: ProcessGroup) -> list[Any]:
        module = make()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
        scenario(model, rank)
        trained = [param for param in module.parameters() if param.requires_grad]
        grads = [model.full_grad(param) for param in trained]
        if options.get("use_distributed_optimizer", True) and size > 1:
            for param, grad in zip(trained, grads, strict=True):
                assert_stands_in(param, grad is not None)
        model.close()
        assert all(param.grad is None for param in module.parameters())
        return grads

    return run_ranks(size, run)


def assert_stands_in(param: nn.Parameter, has_grad: bool = True) -> None:
    """``.grad`` says whether there is a gradient, and shows no element: neither a shard's nor the buffer's."""
    assert (param.grad is not None) == has_grad
    if param.grad is not None:
        assert param.grad.shape == param.shape
        with pytest.raises(ReducedGradError):
            param.grad.norm()


def assert_equal(ours: list[list[Any]], reference: list[list[Any]], relative: float = 0.0) -> None:
    """Absent where absent, and equal: to the bit, or within ``relative`` of the largest element."""
    for mine, theirs in zip(ours, reference, strict=True):
        for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
            assert (here is None) == (there is None), f"parameter {number}"
            if there is not None:
                bound = relative * there.abs().max().item()
                torch.testing.assert_close(here, there, rtol=0, atol=bound, msg=lambda m, n=number: f"{n}: {m}")


def one_backward(model: Any, rank: int) -> None:
    model(batch(rank)).square().sum().backward()
