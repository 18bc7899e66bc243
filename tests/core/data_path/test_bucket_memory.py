"""The memory of a bucket keeps old values, and no later gradient has any of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.models import two_layers
from tests.support.ranks import run_ranks

from .test_reduced_grad import Net, batch

MODES: dict[str, dict[str, Any]] = {
    "scattered": {},
    "all-reduce": {"use_distributed_optimizer": False},
    "rounded": {"grad_wire_dtype": "bf16"},
}
X = torch.ones(3, 20)


class TwoLayers(nn.Module):
    """Two layers; the second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, x: Tensor, uses_second: bool = True) -> Tensor:
        x = self.first(x)
        return (self.second(x) if uses_second else x).sum()


def wrap(group: ProcessGroup, **options: Any) -> tuple[TwoLayers, DistributedDataParallel, DistributedOptimizer]:
    module = TwoLayers()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=500, **options), group)
    return module, model, DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.0), model)


@pytest.mark.parametrize("mode", MODES)
def test_old_values_of_a_view_are_in_no_later_gradient(mode: str) -> None:
    """A layer that one rank leaves out adds nothing there, and one that all leave out has no gradient."""

    def run(rank: int, group: ProcessGroup) -> None:
        module, model, optimizer = wrap(group, **MODES[mode])
        model(X).backward()
        whole = model.full_grad(module.second.weight)
        assert whole is not None
        assert whole.any()
        optimizer.zero_grad()
        model(X, rank == 0).backward()
        half = model.full_grad(module.second.weight)
        assert half is not None
        assert torch.equal(half, whole / 2)
        optimizer.zero_grad()
        model(X, False).backward()
        assert model.full_grad(module.second.weight) is None
        model.close()

    run_ranks(2, run)


def test_microbatches_are_added_to_the_first_grad() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module, model, optimizer = wrap(group)
        model(X).backward()
        once = model.full_grad(module.second.weight)
        assert once is not None
        for _ in range(2):
            optimizer.zero_grad()
            for uses_second in (False, True, False):
                with model.no_sync():
                    model(X, uses_second).backward()
            model(X).backward()
            twice = model.full_grad(module.second.weight)
            assert twice is not None
            assert torch.equal(twice, 2 * once)
        model.close()

    run_ranks(2, run)


# Gradients of flattened buckets are autograd's own, and are freed where user code drops them.


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


# Hooks on gradients run before these are sent, whenever they were registered.

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
