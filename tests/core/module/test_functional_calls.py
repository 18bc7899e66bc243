"""``torch.func.functional_call`` of the wrapped model, with tensors that are computed from its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import parametrizations

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.engines import engines
from tests.support.ranks import run_ranks

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")


class Net(nn.Module):
    """Two layers with tied weights, a parametrised one and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        parametrizations.weight_norm(self.head)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(torch.tanh(self.first(x)))))


Call = Callable[[nn.Module, Tensor], Tensor]


def noisy(model: nn.Module, x: Tensor) -> Tensor:
    return functional_call(model, {name: param * 1.01 for name, param in model.named_parameters()}, (x,))


def masked(model: nn.Module, x: Tensor) -> Tensor:
    """Only one parameter, and a plain call besides."""
    name, weight = next(iter(model.named_parameters()))
    return functional_call(model, {name: weight * (weight > 0.0)}, (x,)) + model(x)


def its_own(model: nn.Module, x: Tensor) -> Tensor:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return functional_call(model, state, (x,), tie_weights=False)


def train(model: nn.Module, optimizer: Any, call: Call, rank: int) -> list[Tensor]:
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        # Every other step calls the model as usual.
        outputs = model(x) if step == 2 else call(model, x)
        outputs.square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        pytest.param(MODES["reduce-scatter"], noisy, id="reduce-scatter-noisy"),
        pytest.param(MODES["forward"], noisy, id="forward-noisy"),
        pytest.param(MODES["all-reduce"], masked, id="all-reduce-masked"),
        pytest.param(MODES["pooled"], its_own, id="pooled-its_own"),
    ],
)
def test_functional_call_trains_as_torch_ddp(options: dict[str, Any], call: Call) -> None:
    def stock(rank: int, group: ProcessGroup) -> list[Tensor]:
        model = TorchDDP(Net(), process_group=group)
        return train(model, sgd(model), call, rank)

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        model = DistributedDataParallel(Net(), DistributedDataParallelConfig(bucket_size=20, **options), group)
        return train(model, DistributedOptimizer(sgd(model), model), call, rank)

    for expected, weights in zip(run_ranks(2, stock), run_ranks(2, run), strict=True):
        assert all(map(torch.equal, weights, expected))
