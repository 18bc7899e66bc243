"""State that an optimizer makes when it is constructed, on 16-bit weights, is that of their fp32 main params once they
are stepped: as in plain torch with fp32 main params of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.prepared_optimizers import CountsOnState, Prepared
from tests.support.ranks import run_ranks

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
NUM_STEPS = 8
THAWS_AT = 3
KINDS: dict[str, MakeOptimizer] = {
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),
    "Adagrad(initial_accumulator_value=0.5)": lambda params: torch.optim.Adagrad(
        params, lr=0.02, initial_accumulator_value=0.5
    ),
    "Prepared": lambda params: Prepared(params, lr=0.02),
    "CountsOnState": lambda params: CountsOnState(params, lr=0.02),
}

Result = tuple[dict[str, Tensor], dict[int, dict[str, Any]]]
"""Weights, and the state of each parameter."""


def change(module: nn.Sequential, step: int) -> None:
    """The first layer's weight is frozen when the optimizer is constructed, and thaws in training."""
    module[0].weight.requires_grad_(step >= THAWS_AT)


def backward(model: Callable[[Tensor], Tensor], rank: int, step: int, dtype: torch.dtype) -> None:
    model(batch(rank, step).to(dtype)).float().square().mean().backward()


def emulate(make: MakeOptimizer, dtype: torch.dtype, size: int) -> Result:
    """Plain torch: gradients in 16 bits, their mean over the ranks and everything else in fp32."""
    module = two_layers().to(dtype)
    mains = [param.detach().float() for param in module.parameters()]
    optimizer = make(mains)
    for step in range(NUM_STEPS):
        change(module, step)
        means = [torch.zeros_like(main) for main in mains]
        for rank in range(size):
            backward(module, rank, step, dtype)
            for mean, param in zip(means, module.parameters(), strict=True):
                if param.grad is not None:
                    mean += param.grad.float()
                    param.grad = None
        for mean, main, param in zip(means, mains, module.parameters(), strict=True):
            main.grad = mean / size if param.requires_grad else None
        optimizer.step()
        with torch.no_grad():
            for main, param in zip(mains, module.parameters(), strict=True):
                param.copy_(main)
    return {name: value.clone() for name, value in module.state_dict().items()}, optimizer.state_dict()["state"]


class Ours:
    """The same under the engine."""

    def __init__(self, make: MakeOptimizer, dtype: torch.dtype, sharded: bool, group: ProcessGroup) -> None:
        self.dtype, self.rank = dtype, group.rank()
        self.module = two_layers().to(dtype)
        change(self.module, 0)
        config = DistributedDataParallelConfig(bucket_size=100, use_distributed_optimizer=sharded)
        self.model = DistributedDataParallel(self.module, config, group)
        self.optimizer = DistributedOptimizer(make(self.module.parameters()), self.model)

    def train(self, steps: range) -> None:
        for step in steps:
            change(self.module, step)
            self.optimizer.zero_grad()
            backward(self.model, self.rank, step, self.dtype)
            self.optimizer.step()

    def result(self) -> Result:
        """The state is rank 0's."""
        weights = {name: value.clone() for name, value in self.module.state_dict().items()}
        return weights, self.optimizer.state_dict()["state"]


def assert_equal(ours: Result, expected: Result) -> None:
    assert_same_tensors(ours[0], expected[0])
    assert ours[1].keys() == expected[1].keys()
    for index, values in expected[1].items():
        assert_same_tensors(ours[1][index], values)


def assert_same_tensors(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].dtype == value.dtype, f"{name} is {ours[name].dtype}"
        assert torch.equal(ours[name], value), f"{name} differs by {(ours[name] - value).abs().max().item():.3g}"


@pytest.mark.parametrize(
    ("make", "size", "sharded", "dtype"),
    [
        (KINDS["Adagrad"], 1, True, torch.bfloat16),
        (KINDS["Adagrad(initial_accumulator_value=0.5)"], 2, False, torch.float16),
        (KINDS["Prepared"], 1, True, torch.bfloat16),
        (KINDS["CountsOnState"], 1, True, torch.bfloat16),
    ],
)
def test_it_equals_plain_torch_with_fp32_main_params(
    make: MakeOptimizer, size: int, sharded: bool, dtype: torch.dtype
) -> None:
    def run(rank: int, group: ProcessGroup) -> Result:
        ours = Ours(make, dtype, sharded, group)
        ours.train(range(NUM_STEPS))
        return ours.result()

    expected = emulate(make, dtype, size)
    results = run_ranks(size, run)
    assert_equal(results[0], expected)
    assert_same_tensors(results[-1][0], expected[0])
