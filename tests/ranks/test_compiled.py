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
    forward = forward_of(model)
    for step in range(4):
        x = torch.randn(6, 10, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


def test_the_model_is_one_graph_and_the_engine_is_not_traced() -> None:
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run_ranks(1, lambda rank, group: train(group, lambda model: torch.compile(model, backend=backend)))
    assert len(graphs) == 1, "the four layers together, and not again in later steps"
    codes = [code for seen in input_codes.seen if (code := seen()) is not None]
    ours = {code.co_name for code in codes if "/megastrategy/" in code.co_filename}
    assert "forward" in ours, "the wrapper was compiled"
    assert all(name == "forward" or name.startswith("torch_dynamo_resume_in_forward") for name in ours), ours


@pytest.mark.parametrize(
    "options", [{}, {"overlap_param_gather": "forward"}, {"use_distributed_optimizer": False}], ids=str
)
def test_two_ranks_train_as_without(options: dict[str, Any]) -> None:
    torch.compiler.reset()

    def run(rank: int, group: ProcessGroup) -> None:
        compiled = train(group, lambda model: torch.compile(model, backend="eager"), **options)
        assert all(map(torch.equal, compiled, train(group, lambda model: model, **options)))

    run_ranks(2, run)
