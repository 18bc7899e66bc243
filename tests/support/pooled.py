"""Models and options for pooled gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megastrategy import DistributedDataParallelConfig

POOLED = {"grad_buffer": "pooled"}


def config(**options: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(**{"bucket_size": 200, **POOLED, **options})


def one_large(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """90 % of all elements are one matrix, of odd size."""
    module = nn.Sequential(nn.Linear(10, 37), nn.Tanh(), nn.Linear(37, 211), nn.Tanh(), nn.Linear(211, 2))
    generator = torch.Generator().manual_seed(5)
    for param in module.parameters():
        param.data = (torch.randn(param.shape, generator=generator) * 0.2).to(dtype)
    numels = [param.numel() for param in module.parameters()]
    assert max(numels) > 0.85 * sum(numels)
    return module
