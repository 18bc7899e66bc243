"""Version counters, by which autograd knows that a tensor of a graph was changed: the engine moves those that torch DDP
and the optimizer would, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.engines import engines
from tests.support.ranks import run_ranks

ENGINES = {
    **engines("reduce-scatter", bucket_size=1),
    **engines("late", overlap_param_gather=False),
    **engines("all-reduce", "pooled", "forward", bucket_size=1),
    **engines("flattened"),
}


class Net(nn.Module):
    """Two norms, whose buffers autograd saves, layers, whose weights it saves, one of them frozen, an unused one, and a
    scale that is a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3 + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.layers(self.norm(x) * self.scale)) * self.scale


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(50 * rank + number))


def wrapped(
    rank: int, group: ProcessGroup, options: Mapping[str, Any] | None, dtype: torch.dtype = torch.float32
) -> tuple[Net, Any, Any]:
    """The module, the wrapped model and its optimizer: torch DDP's, or ours."""
    module = Net().to(dtype)
    if options is None:
        # The optimizer skips what has no gradient there as well.
        model: Any = TorchDDP(module, process_group=group, find_unused_parameters=True)
        return module, model, torch.optim.AdamW(module.parameters(), lr=0.1)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
    return module, model, DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1), model)


def versions(module: nn.Module) -> dict[str, int]:
    return {name: tensor._version for name, tensor in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.parametrize(
    ("size", "dtype", "options"),
    [
        pytest.param(2, torch.float32, ENGINES["reduce-scatter"], id="2-fp32-reduce-scatter"),
        pytest.param(2, torch.float32, ENGINES["all-reduce"], id="2-fp32-all-reduce"),
        pytest.param(2, torch.float32, ENGINES["pooled"], id="2-fp32-pooled"),
        pytest.param(2, torch.float32, ENGINES["forward"], id="2-fp32-forward"),
        pytest.param(2, torch.float32, ENGINES["flattened"], id="2-fp32-flattened"),
        pytest.param(1, torch.bfloat16, ENGINES["late"], id="1-bf16-late"),
    ],
)
def test_a_step_moves_the_versions_of_what_it_steps(size: int, dtype: torch.dtype, options: Mapping[str, Any]) -> None:
    """On every rank, whichever rank owns the elements, so that a backward through an older graph is refused."""

    def run(rank: int, group: ProcessGroup, options: Mapping[str, Any] | None) -> list[set[str]]:
        module, model, optimizer = wrapped(rank, group, options, dtype)
        moved: list[set[str]] = []
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch(rank, step).to(dtype)).square().mean()
            before = versions(module)
            loss.backward(retain_graph=True)
            assert versions(module) == before
            optimizer.step()
            moved.append({name for name, version in versions(module).items() if version != before[name]})
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        if options is not None:
            model.close()
        return moved

    theirs = run_ranks(size, lambda rank, group: run(rank, group, None))
    ours = run_ranks(size, lambda rank, group: run(rank, group, options))
    assert ours == theirs
    assert all("unused.weight" not in moved and "layers.3.weight" in moved for moved in ours[0])
