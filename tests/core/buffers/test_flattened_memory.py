"""Gradients of flattened buckets are autograd's own, and are freed where user code drops them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


def test_dropped_gradients_are_freed() -> None:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=False, use_contiguous_buffers=False, overlap_grad_reduce=False
    )

    def run(rank: int, group: Any) -> None:
        model = DistributedDataParallel(two_layers(), config, group)
        model(torch.ones(2, 10)).sum().backward()
        grads = [weakref.ref(param.grad) for param in model.parameters()]
        assert all(grad() is not None for grad in grads)
        model.zero_grad()
        assert all(grad() is None for grad in grads)

    run_ranks(2, run)
