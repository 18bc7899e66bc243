"""Modules whose forward replays a CUDA graph are not moved away from under it.

No graph can be captured on the host. What marks a captured module is made here by the inner function of torch's own
``make_graphed_callables`` that marks it there.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.layers_in_any_order import Layers, batch
from tests.support.ranks import run_ranks


def capture(module: nn.Module) -> None:
    """Replaces the forward as ``make_graphed_callables(module)`` does; the "graph" is the module's own forward."""
    outer = torch.cuda.make_graphed_callables.__code__
    [code] = [
        const
        for const in outer.co_consts
        if isinstance(const, types.CodeType) and const.co_name == "make_graphed_forward"
    ]
    make_graphed_forward: Any = types.FunctionType(code, torch.cuda.graphs.__dict__)
    module.forward = make_graphed_forward(module, module.training, module.forward, module.forward)


def refusal(group: ProcessGroup, module: nn.Module, **options: Any) -> str:
    with pytest.raises(ValueError, match="make_graphed_callables") as caught:
        DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
    return str(caught.value)


def test_captured_module_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        inner = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
        capture(inner[1])
        text = refusal(group, inner)
        assert text.startswith("'1' was captured")
        assert "capture there after the first optimizer step" in text
        assert "use_distributed_optimizer=False" in text
        whole = nn.Linear(3, 3)
        capture(whole)
        assert refusal(group, whole).startswith("the module itself was captured")

    run_ranks(2, run)


@pytest.mark.parametrize("captured_on", [0, 1])
def test_capture_before_first_backward_is_refused(captured_on: int) -> None:
    """The parameters move at the end of the first backward."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = Layers(reverse=True)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=500), group)
        if rank == captured_on:
            capture(module)
            with pytest.raises(ValueError, match=r"the module itself was captured.* after the first optimizer step"):
                model(batch(rank, 0))

    run_ranks(2, run)


def test_capture_after_first_step_trains() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = Layers(reverse=True)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=500), group)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
        addresses = []
        for step in range(3):
            model(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            addresses.append([param.data_ptr() for param in module.parameters()])
            if step == 0:
                capture(module)
        assert addresses[1:] == addresses[:1] * 2

    run_ranks(2, run)
