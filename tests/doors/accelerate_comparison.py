"""A small model and its inputs, and the comparison of a job under ours with the same job under torch DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..support.comparison import assert_equal
from .accelerate_loops import Worlds
from .matrix import MODES

both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def net_of(seed: int = 0, width: int = 13) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def inputs(accelerator: Any, number: int = 0) -> Tensor:
    """This rank's."""
    generator = torch.Generator().manual_seed(10 * number + accelerator.process_index)
    return torch.randn(4, 5, generator=generator)


def grads_of(model: Any) -> dict[str, Tensor | None]:
    """Whole, as torch DDP has them in ``.grad``."""
    named = dict(model.module.named_parameters())
    if hasattr(model, "full_grad"):
        return {name: model.full_grad(param) for name, param in named.items()}
    return {name: None if param.grad is None else param.grad.clone() for name, param in named.items()}


def with_mode(name: str, mode: dict[str, Any]) -> dict[str, Any] | None:
    return mode if name == "megatron_ddp" else None


def assert_like_ddp(
    worlds: Worlds, job: Callable[..., Any], mode: dict[str, Any], rtol: float = 0.0, *arguments: Any
) -> list[Any]:
    """The job's results under ours, which are those under torch DDP; 1e-6 is for the order of a sum over shards."""
    expected = worlds.run(job, "ddp", mode, *arguments)
    ours = worlds.run(job, "megatron_ddp", mode, *arguments)
    assert_equal(ours, expected, rtol if mode["use_distributed_optimizer"] else 0.0)
    return expected
