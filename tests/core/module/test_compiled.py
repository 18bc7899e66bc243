"""torch.compile of a wrapped model compiles the model, and nothing of the engine around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import input_codes
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
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
