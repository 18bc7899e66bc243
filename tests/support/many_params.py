"""A model of twelve parameters, and what its optimizer is stepped with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

from .kept_lists import Notes


class Many(nn.Module):
    """Small parameters, each used by itself: ``forward`` takes the numbers of the ones to use."""

    def __init__(self, count: int, numel: int = 10, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(numel, generator=generator).to(dtype) for _ in range(count)]
        self.weights = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self, used: list[int], factor: float) -> Tensor:
        return factor * torch.stack([self.weights[i].float().square().sum() for i in used]).sum()


class Setup:
    def __init__(
        self,
        group: ProcessGroup,
        module: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=0.1),
        **options: Any,
    ) -> None:
        self.module = module
        self.model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
        self.stepped = Notes()  # by call, by group
        inner = make(self.model.parameters())
        step = type(inner).step

        class Noting(type(inner)):  # type: ignore[misc]
            def step(noting, closure: Any = None) -> None:
                self.stepped.append([list(group["params"]) for group in noting.param_groups])
                step(noting)

        inner.__class__ = Noting
        self.optimizer = DistributedOptimizer(inner, self.model)

    def step(self, *args: Any) -> None:
        self.stepped.clear()
        self.optimizer.zero_grad()
        self.model(*args).backward()
        self.optimizer.step()


def reference(
    module: nn.Module, steps: list[tuple[list[int], float]], make: Callable[[Any], torch.optim.Optimizer]
) -> tuple[list[Tensor], dict[str, Any]]:
    optimizer = make(module.parameters())
    for used, factor in steps:
        optimizer.zero_grad()
        module(used, factor).backward()
        optimizer.step()
    return [param.detach() for param in module.parameters()], optimizer.state_dict()


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert state["state"][index].keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(state["state"][index][name]), torch.as_tensor(value)), (index, name)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=0.01)


ALL = list(range(12))


def without(left_out: int) -> list[int]:
    return [i for i in ALL if i != left_out]


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)
