"""Trainings whose gradients are given, so that any number of ranks has the same bits, with their files."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import make_collectives
from tests.support.ranks import run_ranks
from tests.support.training import load_in_order


class Given(nn.Module):
    """Parameters whose gradients are given: multiples of three, the same on all ranks, so that the mean over one, two,
    three or four of them is exact; 300 + 7 * 50 + 1 + 65 elements, which no number of ranks divides evenly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes: tuple[tuple[int, ...], ...] = ((300,), (7, 50), (), (65,))
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)) for shape in shapes
        )

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        total = torch.zeros(())
        for weight in self.weights:
            factor = 3.0 * torch.randint(-40, 41, weight.shape, generator=generator)
            total = total + (weight * factor.to(weight.dtype)).float().sum()
        return total


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, amsgrad=True)


class Momentum(torch.optim.SGD):
    """Is surprised by state that it did not make."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for tensor in group["params"]:
                assert self.state[tensor].keys() <= {"momentum_buffer"}
        return super().step(closure)


def momentum(params: Any) -> torch.optim.Optimizer:
    return Momentum(params, lr=0.001, momentum=0.9, weight_decay=0.1)


class Ours:
    def __init__(
        self,
        group: ProcessGroup,
        make: Any,
        dtype: torch.dtype,
        *,
        kind: type[Given] = Given,
        frozen: int | None = None,
        **options: Any,
    ) -> None:
        self.module = kind(dtype)
        if frozen is not None:
            self.module.weights[frozen].requires_grad_(False)
        config = DistributedDataParallelConfig(**{"bucket_size": 200, **options})
        self.collectives = make_collectives(group, torch.device("cpu"))
        self.model = DistributedDataParallel(self.module, config, collectives=self.collectives)
        self.optimizer = DistributedOptimizer(make(self.module.parameters()), self.model)

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(step).backward()
            self.optimizer.step()
        self.model.finish_param_gather()

    def file(self) -> dict[str, Any]:
        """The contents of a file, on every rank."""
        own = {"optimizer": self.optimizer.state_dict(), "main": self.optimizer.main_params()}
        own["model"] = {name: value.clone() for name, value in self.module.state_dict().items()}
        return copy.deepcopy(self.collectives.all_gather_objects(own)[0])

    def load(self, file: dict[str, Any], order: tuple[str, ...] = ("model", "optimizer", "main")) -> None:
        load_in_order(self, file, order)


def trained(size: int, make: Any, dtype: torch.dtype, steps: range, before: Any = None, **options: Any) -> Any:
    def run(rank: int, group: ProcessGroup) -> Any:
        ours = Ours(group, make, dtype, **options)
        if before is not None:
            ours.load(before)
        ours.train(steps)
        file = ours.file()
        ours.model.close()
        return file

    return run_ranks(size, run)[0]


def assert_same_file(mine: Any, other: Any) -> None:
    """Tensors to the bit, with dtypes and shapes."""
    assert type(mine) is type(other)
    if isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key in mine:
            assert_same_file(mine[key], other[key])
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            assert_same_file(one, two)
    elif isinstance(mine, Tensor):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert torch.equal(mine, other)
    else:
        assert mine == other
