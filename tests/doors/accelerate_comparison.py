"""A small model and its inputs, and the comparison of a job under ours with the same job under torch DDP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..support.comparison import assert_equal
from .accelerate_loops import Worlds, make_accelerator, sgd, weights_of
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


@dataclasses.dataclass
class Trainee:
    """A model and its optimizer, prepared by an Accelerator."""

    accelerator: Any
    net: Any
    model: Any
    optimizer: Any

    def backward(self, number: int = 0, factor: float = 1.0) -> float:
        """Of this rank's inputs of that number; the loss."""
        x = inputs(self.accelerator, number).to(next(self.net.parameters()).dtype)
        loss = factor * self.model(x).float().square().mean()
        self.accelerator.backward(loss)
        return loss.item()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *numbers: int) -> dict[str, Tensor]:
        """A step with each of these inputs; the weights."""
        for number in numbers:
            self.backward(number)
            self.step()
        return weights_of(self.net)


def set_up(
    name: str,
    mode: dict[str, Any] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    net: nn.Module | None = None,
    **options: Any,
) -> Trainee:
    """``net``: :func:`net_of`'s by default."""
    accelerator = make_accelerator(name, mode, **options)
    net = net_of() if net is None else net
    return Trainee(accelerator, net, *accelerator.prepare(net, make_optimizer(net.parameters())))


def assert_like_ddp(
    worlds: Worlds, job: Callable[..., Any], mode: dict[str, Any], rtol: float = 0.0, *arguments: Any
) -> list[Any]:
    """The job's results under ours, which are those under torch DDP; 1e-6 is for the order of a sum over shards."""
    expected = worlds.run(job, "ddp", mode, *arguments)
    ours = worlds.run(job, "megatron_ddp", mode, *arguments)
    assert_equal(ours, expected, rtol if mode["use_distributed_optimizer"] else 0.0)
    return expected
