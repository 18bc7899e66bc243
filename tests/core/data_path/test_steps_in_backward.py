"""Optimizers that step in gradient hooks, with this rank's gradients, are refused; hooks that scale gradients stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig
from megastrategy.core.errors import ParameterChangedError
from tests.support.engines import engines
from tests.support.ranks import try_ranks

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")
Register = Callable[[nn.Module], None]


def each_param(hook: Callable[[Tensor, torch.optim.Optimizer], None]) -> Register:
    def register(module: nn.Module) -> None:
        for param in module.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)
            param.register_post_accumulate_grad_hook(lambda param, optimizer=optimizer: hook(param, optimizer))

    return register


def step_and_drop(param: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    param.grad = None


def step_and_zero_grad(param: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def step(param: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def drop(param: Tensor, optimizer: torch.optim.Optimizer) -> None:
    param.grad = None


def write_data(param: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """LOMO's update, which autograd does not see."""
    param.data.add_(param.grad, alpha=-0.1)  # type: ignore[arg-type]
    param.grad = None


HOOKS = {
    function.__name__: each_param(function) for function in (step_and_drop, step_and_zero_grad, step, drop, write_data)
}


def lomo(module: nn.Module) -> None:
    """LOMO's own hooks: each updates the parameters whose gradients have come before."""
    params = list(module.parameters())

    def update(grad: Tensor) -> Tensor:
        for param in params:
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)
                param.grad = None
        return grad

    for param in params:
        param.register_hook(update)


def try_training(options: dict[str, Any], register: Register, *, first: bool, size: int = 2) -> list[Any]:
    def run(rank: int, group: ProcessGroup) -> None:
        module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 200))
        if first:
            register(module)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=2000, **options), group)
        if not first:
            register(module)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 8) * (1 + rank)).square().mean().backward()

    return try_ranks(size, run, timeout_s=20)


@pytest.mark.parametrize(
    ("options", "hook", "first"),
    [
        pytest.param(MODES["reduce-scatter"], "step_and_drop", True, id="reduce-scatter-step_and_drop-True"),
        pytest.param(MODES["all-reduce"], "step_and_zero_grad", False, id="all-reduce-step_and_zero_grad-False"),
        pytest.param(MODES["pooled"], "step", True, id="pooled-step-True"),
        pytest.param(MODES["forward"], "drop", True, id="forward-drop-True"),
        pytest.param(MODES["reduce-scatter"], "write_data", True, id="reduce-scatter-write_data-True"),
    ],
)
def test_step_in_hook_raises(options: dict[str, Any], hook: str, *, first: bool) -> None:
    for error in try_training(options, HOOKS[hook], first=first):
        assert isinstance(error, ParameterChangedError)
        assert "hook" in str(error)
        assert "Step after backward()" in str(error)


@pytest.mark.parametrize("size", [1, 2])
def test_lomo_raises(size: int) -> None:
    for error in try_training({}, lomo, first=True, size=size):
        assert isinstance(error, ParameterChangedError)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_scaling_hook_stays(options: dict[str, Any]) -> None:
    def halve(param: Tensor, _: torch.optim.Optimizer) -> None:
        param.grad = param.grad * 0.5  # type: ignore[operator]

    assert try_training(options, each_param(halve), first=True) == [None, None]
