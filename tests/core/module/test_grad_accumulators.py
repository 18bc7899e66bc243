"""autograd's nodes that accumulate gradients are those of the wrapping, so that all hooks run on one stream.

The host has no streams. What is shown here is what decides the stream on a device: which node a forward's graph has,
and which stream was the current one when it was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import devices
from megastrategy.core.module import grad_accumulators
from tests.support.gradients import ENGINE_IDS, ENGINES
from tests.support.ranks import run_ranks


def two_branches() -> nn.ModuleList:
    generator = torch.Generator().manual_seed(3)
    module = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)])
    for param in module.parameters():
        nn.init.normal_(param, generator=generator)
    return module


class Model(nn.Module):
    """Two branches and a head; ``use_second`` says whether the second branch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = two_branches()
        self.use_second = True

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        return self.layers[2](first + self.layers[1](x)) if self.use_second else self.layers[2](first)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(x).square().mean()
    return loss


def leaves(loss: Tensor) -> dict[int, Node]:
    """The nodes of a graph that accumulate gradients, by ``id`` of the parameter."""
    found: dict[int, Node] = {}
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node
        todo += [following for following, _ in node.next_functions]
    return found


def mark(params: Any, name: str) -> None:
    """Marks the nodes that the parameters have at this moment: a mark goes with its node."""
    for param in params:
        get_gradient_edge(param).node.metadata[name] = True


def is_marked(nodes: dict[int, Node], name: str) -> list[bool]:
    return [name in node.metadata for node in nodes.values()]


@pytest.mark.parametrize("options", ENGINES, ids=ENGINE_IDS)
def test_every_forward_uses_the_nodes_of_the_wrapping(options: dict[str, Any]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = Model()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        mark(module.parameters(), "wrapped")
        for step in range(3):  # the first may end with a move of all parameters
            loss = loss_of(model, rank, step)
            nodes = leaves(loss)
            assert len(nodes) == 6
            assert is_marked(nodes, "wrapped") == [True] * 6
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, nodes
        model.close()
        assert is_marked(leaves(loss_of(module, rank, 9)), "wrapped") == [False] * 6, "a plain module again"

    run_ranks(2, run)


def test_nodes_of_16_bit_params_accumulate_in_fp32() -> None:
    """A node that was made before the gradient's dtype was set would round what it accumulates."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = Model().bfloat16()
        kept = [get_gradient_edge(param).node for param in module.parameters()]
        mark(module.parameters(), "before")
        config = DistributedDataParallelConfig(use_distributed_optimizer=False)
        model = DistributedDataParallel(module, config, group)
        for number in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).bfloat16()
            with model.no_sync():
                loss = model(x).float().square().mean()
                assert is_marked(leaves(loss), "before") == [True] * 6
                loss.backward()
        assert len(kept) == 6
        grads = [param.grad for param in module.parameters()]
        assert all(grad is not None and grad.dtype == torch.float32 for grad in grads)
        assert any(not torch.equal(grad, grad.bfloat16().float()) for grad in grads if grad is not None)

    run_ranks(2, run)


class _Streams:
    """In place of a device's: one current stream, by name, and on which stream each node was asked for."""

    def __init__(self) -> None:
        self.current = "loop"
        self.taken: dict[int, str] = {}

    def current_stream(self, device: Any = None) -> str:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def get_gradient_edge(self, param: Parameter) -> Any:
        self.taken[id(param)] = self.current
        return get_gradient_edge(param)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> _Streams:
    found = _Streams()
    monkeypatch.setattr(devices, "is_on_host", lambda device: False)
    monkeypatch.setattr(torch.cpu, "current_stream", found.current_stream)
    monkeypatch.setattr(torch.cpu, "stream", found.stream)
    monkeypatch.setattr(grad_accumulators, "get_gradient_edge", found.get_gradient_edge)
    return found


def test_nodes_follow_the_loop_to_another_stream(streams: _Streams) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = Model()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(), group)
        mark(module.parameters(), "loop")
        assert set(streams.taken.values()) == {"loop"}
        with streams.stream("side"):
            loss_of(model, rank, 0).backward()
            assert list(streams.taken.values()) == ["side"] * 6
            mark(module.parameters(), "side")
            loss = loss_of(model, rank, 1)
            assert is_marked(leaves(loss), "loop") == [False] * 6, "made anew"
            assert is_marked(leaves(loss), "side") == [True] * 6, "once"

    run_ranks(1, run)
