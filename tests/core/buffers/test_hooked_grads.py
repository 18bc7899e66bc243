"""Hooks on gradients run before these are sent, whenever they were registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.ranks import run_ranks

from .test_reduced_grad import Net, batch

Program = Callable[[Any, Net, Any, int], list[Tensor]]
"""Trains a model with an optimizer on a rank, and returns what is compared."""


def by_rank(program: Program, options: dict[str, Any] | None) -> list[list[Tensor]]:
    """Returns the program's result; under torch DDP without ``options``."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        net = Net()
        model: Any = TorchDDP(net, process_group=group, find_unused_parameters=True)
        if options is not None:
            model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), group)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        found = program(model, net, inner if options is None else DistributedOptimizer(inner, model), rank)
        return [tensor.detach().clone() for tensor in found]

    return run_ranks(2, run)


def assert_as_under_torch_ddp(program: Program, options: dict[str, Any]) -> None:
    for mine, theirs in zip(by_rank(program, options), by_rank(program, None), strict=True):
        assert all(map(torch.equal, mine, theirs))


def halve(param: Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("options", "registered"),
    [
        ({}, "after the wrapping"),
        ({"use_distributed_optimizer": False}, "after a step"),
        ({"grad_buffer": "pooled"}, "before a backward"),
    ],
    ids=str,
)
def test_late_grad_hooks_change_what_is_sent(options: dict[str, Any], registered: str) -> None:
    def program(model: Any, net: Net, optimizer: Any, rank: int) -> list[Tensor]:
        def register() -> None:
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(halve)

        if registered == "after the wrapping":
            register()
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch(rank, step)).square().mean()
            if step == 1 and registered == "before a backward":
                register()
            loss.backward()
            optimizer.step()
            if step == 0 and registered == "after a step":
                register()
        return list(net.parameters())

    assert_as_under_torch_ddp(program, {"bucket_size": 40, **options})
