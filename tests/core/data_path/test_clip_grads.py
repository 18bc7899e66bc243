"""The norm of many gradients: what it costs, what is rounded, and devices without fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.data_path.norms import total_grad_norm
from tests.support.budgets import Operations
from tests.support.models import two_layers
from tests.support.ranks import run_ranks
from tests.support.thread_mode import ThreadMode

CPU = torch.device("cpu")
NORM_TYPES = [1.0, 2.0, math.inf]


def draw(number: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(100 + i, generator=generator).to(dtype) for i in range(number)]


class WithoutFp64(ThreadMode):
    """Refuses fp64, as Apple's GPUs do."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result)):
            raise TypeError("the framework does not support float64")
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_the_number_of_kernels_is_that_of_one_gradient(dtype: torch.dtype) -> None:
    counts = []
    for number in (1, 50):
        grads = draw(number, dtype)
        with Operations() as operations:
            total_grad_norm(grads, 2.0, None, CPU)
        counts.append(operations.counts)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norms_of_several_dtypes_count_grads_once(norm_type: float) -> None:
    grads = [*draw(2), *draw(3, torch.bfloat16), *draw(1, torch.float64), *draw(1)]
    expected = torch.linalg.vector_norm(torch.cat([grad.double() for grad in grads]), norm_type)
    torch.testing.assert_close(total_grad_norm(grads, norm_type, None, CPU), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": False}], ids=str)
def test_a_device_without_fp64_has_norms_in_fp32(options: dict[str, Any]) -> None:
    def run(rank: int, group: Any) -> tuple[Tensor, ...]:
        model = DistributedDataParallel(two_layers(), DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(torch.full((2, 10), 1.0 + rank)).sum().backward()
        expected = model.grad_norms(), optimizer.grad_norm()
        with WithoutFp64():
            norms, total = model.grad_norms(), optimizer.grad_norm()
            clipped = optimizer.clip_grad_norm_(0.5)
        assert norms.dtype == total.dtype == torch.float32
        torch.testing.assert_close(norms, expected[0].float())
        torch.testing.assert_close(total, expected[1])
        torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(0.5))
        return norms, total, clipped

    first, second = run_ranks(2, run)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_gradient_without_elements_has_the_norm_zero(norm_type: float) -> None:
    """torch's kernel has no largest of none; one rank alone would raise, and the others wait for it."""
    grads = draw(3)
    total = total_grad_norm(grads, norm_type, None, CPU)
    assert torch.equal(total_grad_norm([torch.empty(0, 3), *grads], norm_type, None, CPU), total)
    assert total_grad_norm([torch.empty(0)], norm_type, None, CPU) == 0
