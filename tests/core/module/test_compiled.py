"""torch.compile of a wrapped model compiles the model and nothing of the engine; its graphs are split at buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.convert_frame import input_codes
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.events import EventKind
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks


def model_with_buffers() -> nn.Module:
    module = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(0)  # ranks are threads, and share torch's own
    for param in module.parameters():
        nn.init.normal_(param, std=0.3, generator=generator)
    return module


def train(group: ProcessGroup, forward_of: Callable[[Any], Any], **options: Any) -> list[Tensor]:
    module = model_with_buffers()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=50, **options), group)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    wait_for_others(group)
    forward = forward_of(model)
    for step in range(4):
        x = torch.randn(6, 10, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


def wait_for_others(group: ProcessGroup) -> None:
    """AdamW is tried at its making, and asks whether something is compiled, which torch notes once for a process."""
    if group.size() > 1:
        group.barrier().wait()


def compiled_of_ours() -> set[str]:
    """The names of our functions that dynamo began to compile since the last reset."""
    codes = [code for seen in input_codes.seen if (code := seen()) is not None]
    return {code.co_name for code in codes if "/megastrategy/" in code.co_filename}


def test_compiled_model_is_one_graph() -> None:
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run_ranks(1, lambda rank, group: train(group, lambda model: torch.compile(model, backend=backend)))
    assert len(graphs) == 1, "the four layers together, and not again in later steps"
    assert "_call_module" in compiled_of_ours(), "through the wrapper"
    assert compiled_of_ours() <= {"_call_module", "forward"}, "forward is looked at, and skipped"


@pytest.mark.parametrize("options", [{}, {"overlap_param_gather": True}], ids=str)
def test_two_ranks_train_as_without(options: dict[str, Any]) -> None:
    torch.compiler.reset()

    def run(rank: int, group: ProcessGroup) -> None:
        compiled = train(group, lambda model: torch.compile(model, backend="eager"), **options)
        assert all(map(torch.equal, compiled, train(group, lambda model: model, **options)))

    run_ranks(2, run)


def test_compiled_model_is_wrapped() -> None:
    """A public project's order. The engine is not traced, in no forward and no backward."""
    torch.compiler.reset()

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        module: Any = torch.compile(model_with_buffers(), backend="eager")
        x = torch.randn(6, 10, generator=torch.Generator().manual_seed(rank))
        module(x).square().mean().backward()
        module.zero_grad()
        wait_for_others(group)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=50), group)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
        wait_for_others(group)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    first, second = run_ranks(2, run)
    assert all(map(torch.equal, first, second))
    assert compiled_of_ours() == set()


# Reductions start under compiled backwards: graphs are split at buckets, as under torch DDP.


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


# --- values ----------------------------------------------------------------------------------------------------------


def train_layers(wrap: Callable[[nn.Module], Any], make: Callable[[Any, Any], Any], backend: Any) -> list[Tensor]:
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
    theirs = train_layers(lambda module: TorchDDP(module, bucket_cap_mb=1), lambda optimizer, _: optimizer, backend)
    pairs = []
    for each in options:
        config = DistributedDataParallelConfig(bucket_size=WIDTH * WIDTH, **each)

        def wrap(module: nn.Module, config: DistributedDataParallelConfig = config) -> DistributedDataParallel:
            return DistributedDataParallel(module, config)

        pairs.append((theirs, train_layers(wrap, DistributedOptimizer, backend)))
    return pairs


def test_split_graphs_train_as_torch_ddps_do() -> None:
    for pairs in run_processes(2, trained_by_both, "aot_eager", [{}, {"use_distributed_optimizer": False}]):
        for theirs, ours in pairs:
            assert all(map(torch.equal, theirs, ours))
