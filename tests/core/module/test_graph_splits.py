"""Reductions start under compiled backwards: graphs are split at buckets, as under torch DDP.

Ranks are processes where something is compiled: torch keeps modes for the whole process meanwhile, which threads would
meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.events import EventKind
from tests.support.processes import run_processes

WIDTH = 512
"""A layer's weights have 1 MiB, the least that torch makes a piece of a graph of."""
WAYS = ["wrapper", "module", "in place"]
"""What is compiled."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        generator = torch.Generator().manual_seed(1)
        for param in self.parameters():
            nn.init.normal_(param, std=0.05, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


class Counted:
    """A backend of torch.compile that counts the graphs it gets."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self.num_graphs += 1
        return aot_eager(graph, inputs, **options)


def order_of_second_backward(how: str, options: dict[str, Any]) -> tuple[list[EventKind], int]:
    """Returns the events, and the number of graphs. The first backward compiles, and may end with a move."""
    torch.compiler.reset()
    kinds: list[EventKind] = []
    backend, module = Counted(), Layers()
    if how == "in place":
        module.compile(backend=backend)
    inner: Any = torch.compile(module, backend=backend) if how == "module" else module
    # A bucket a layer.
    config = DistributedDataParallelConfig(**{"bucket_size": WIDTH * WIDTH, **options})
    model = DistributedDataParallel(inner, config, listener=lambda event: kinds.append(event.kind))
    forward: Any = torch.compile(model, backend=backend) if how == "wrapper" else model
    for step in range(2):
        kinds.clear()
        forward(batch(dist.get_rank(), step)).sum().backward()
    model.close()
    assert TorchDDP._active_ddp_module is None
    return [kind for kind in kinds if kind in (EventKind.GRAD_READY, EventKind.REDUCE_START)], backend.num_graphs


CASES: list[tuple[str, dict[str, Any]]] = [
    *((how, {}) for how in WAYS),
    ("wrapper", {"use_distributed_optimizer": False}),
    ("wrapper", {"grad_buffer": "pooled"}),
]


def orders(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[list[EventKind], int]]:
    """All cases, since a process takes as long to start as they do."""
    return [order_of_second_backward(how, options) for how, options in cases]


@pytest.mark.parametrize(
    "cases", [CASES[:2], pytest.param(CASES[2:], marks=pytest.mark.nightly)], ids=["some", "others"]
)
def test_reductions_start_under_compiled_backwards(cases: list[tuple[str, dict[str, Any]]]) -> None:
    for by_case in run_processes(2, orders, cases):
        for (order, num_graphs), case in zip(by_case, cases, strict=True):
            ready = [index for index, kind in enumerate(order) if kind is EventKind.GRAD_READY]
            sent = [index for index, kind in enumerate(order) if kind is EventKind.REDUCE_START]
            assert (len(ready), len(sent), num_graphs) == (6, 3, 3), case
            assert sum(start < ready[-1] for start in sent) == 2, (case, "all but the last, before the last gradient")


WHOLE: dict[int, list[dict[str, Any]]] = {1: [{}], 2: [{"overlap_grad_reduce": False}, {"bucket_size": 10**9}]}
"""By the number of ranks, options with which nothing can be sent earlier."""


def graphs() -> list[int]:
    return [order_of_second_backward("module", options)[1] for options in WHOLE[dist.get_world_size()]]


# --- values ----------------------------------------------------------------------------------------------------------


def train(wrap: Callable[[nn.Module], Any], make: Callable[[Any, Any], Any], backend: Any) -> list[Tensor]:
    torch.compiler.reset()
    module = Layers()
    model = wrap(module)
    compiled = torch.compile(model, backend=backend)
    optimizer = make(torch.optim.AdamW(module.parameters(), lr=1e-2), model)
    losses = []
    for step in range(3):
        loss = compiled(batch(dist.get_rank(), step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(param.detach().clone() for param in module.parameters())]


def trained_by_both(backend: str, options: list[dict[str, Any]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """By torch DDP and by ours, for each of several options."""
    theirs = train(lambda module: TorchDDP(module, bucket_cap_mb=1), lambda optimizer, _: optimizer, backend)
    pairs = []
    for each in options:
        config = DistributedDataParallelConfig(bucket_size=WIDTH * WIDTH, **each)

        def wrap(module: nn.Module, config: DistributedDataParallelConfig = config) -> DistributedDataParallel:
            return DistributedDataParallel(module, config)

        pairs.append((theirs, train(wrap, DistributedOptimizer, backend)))
    return pairs


def test_split_graphs_train_as_torch_ddps_do() -> None:
    for pairs in run_processes(2, trained_by_both, "aot_eager", [{}, {"use_distributed_optimizer": False}]):
        for theirs, ours in pairs:
            assert all(map(torch.equal, theirs, ours))


# --- the attribute of torch's DDP ------------------------------------------------------------------------------------
