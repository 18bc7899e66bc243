"""Gradients that user code moves to other memory, by way of the module or by themselves, at any time of a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.engines import engines
from tests.support.ranks import run_ranks

ENGINES = {
    **engines("reduce-scatter", bucket_size=1),
    **engines("late all-reduce"),
    **engines("all-reduce", bucket_size=1),
    **engines("flattened", "pooled"),
}


class Net(nn.Module):
    """One layer is used by rank 0 only, and one by no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 3)
        self.rank_zero, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param, std=0.03, generator=generator)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.second(self.first(x))
        return self.rank_zero(x) if rank == 0 else x


def in_half(net: Net) -> None:
    net.half()
    net.float()


def in_double(net: Net) -> None:
    net.double()
    net.float()


def moved_by_hand(net: Net) -> None:
    for param in net.parameters():
        if param.grad is not None and type(param.grad) is Tensor:
            param.grad.data = param.grad.data.clone()


MOMENTS = ("between microbatches", "after backward", "after the step", "after zero_grad")
DROPS: dict[str, Callable[[Any, Net], None]] = {
    "optimizer": lambda optimizer, net: optimizer.zero_grad(),
    "module": lambda optimizer, net: net.zero_grad(),
    "zeros": lambda optimizer, net: optimizer.zero_grad(set_to_none=False),
    "kept": lambda optimizer, net: None,
}


def average_(net: Net, group: ProcessGroup) -> None:
    """The result of an all-reduce: torch DDP loses its hooks if a parameter changes its dtype."""
    for param in net.parameters():
        has_grad = torch.tensor([float(param.grad is not None)])
        group.allreduce([has_grad]).wait()
        if has_grad.item():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad.div_(group.size())
            group.allreduce([param.grad]).wait()


def train(
    rank: int,
    group: ProcessGroup,
    options: Mapping[str, Any] | None,
    move: Callable[[Net], None],
    moment: str,
    drop: str,
) -> list[Tensor | None]:
    """Gradients of four steps, two of them with a move, and weights; without options of :func:`average_`."""
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model: Any = net
    optimizer: Any = inner
    if options is not None:
        model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(inner, model)
    found: list[Tensor | None] = []
    for step in range(4):
        moments = {moment} if step in (1, 2) else set()
        for microbatch in range(2):
            x = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * rank + 10 * step + microbatch))
            accumulates = options is not None and microbatch == 0
            with model.no_sync() if accumulates else contextlib.nullcontext():
                model(x, rank).square().mean().backward()
            if microbatch == 0 and "between microbatches" in moments:
                move(net)
        if options is None:
            average_(net, group)
        if "after backward" in moments:
            move(net)
        grads = [param.grad if options is None else model.full_grad(param) for param in net.parameters()]
        found += [None if grad is None else grad.clone() for grad in grads]
        optimizer.step()
        if "after the step" in moments:
            move(net)
        DROPS[drop](optimizer, net)
        if "after zero_grad" in moments:
            move(net)
    found += [param.detach().clone() for param in net.parameters()]
    if options is not None:
        model.close()
    return found


Found = list[list[Tensor | None]]


def every_moment(size: int, move: Callable[[Net], None], options: Mapping[str, Any] | None) -> Found:
    def run(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        return [found for when in MOMENTS for how in DROPS for found in train(rank, group, options, move, when, how)]

    return run_ranks(size, run)


@functools.cache
def reference(size: int, move: Callable[[Net], None]) -> Found:
    return every_moment(size, move, None)


@pytest.mark.parametrize(
    ("move", "size", "options"),
    [
        (in_half, 2, ENGINES["reduce-scatter"]),
        (moved_by_hand, 2, ENGINES["all-reduce"]),
        (in_half, 2, ENGINES["flattened"]),
        (in_half, 2, ENGINES["pooled"]),
        (in_double, 1, ENGINES["late all-reduce"]),
    ],
)
def test_moved_gradients_are_those_of_an_average(
    move: Callable[[Net], None], size: int, options: Mapping[str, Any]
) -> None:
    # Scattered gradients are not there to be rounded; where they are whole, all are.
    rounds = move is in_half and options.get("use_distributed_optimizer", True)
    for mine, expected in zip(every_moment(size, move, options), reference(size, move), strict=True):
        for number, (here, there) in enumerate(zip(mine, expected, strict=True)):
            assert (here is None) == (there is None), number
            if here is not None and there is not None:
                bound = (1e-2 if rounds else 1e-6) * there.abs().max().item()
                torch.testing.assert_close(here, there, rtol=0, atol=bound, msg=lambda m, n=number: f"{n}: {m}")
