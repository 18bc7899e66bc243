"""A parameter or a submodule that is replaced in training is named; what only moves, leaves or comes is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ParameterChangedError
from tests.support.engines import engines
from tests.support.ranks import run_ranks

MODES = engines("reduce-scatter", "all-reduce", "pooled")


class Net(nn.Module):
    """Three blocks in a list (the forward runs the present ones), a frozen layer, an auxiliary loss, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.aux: nn.Module | None = nn.Linear(5, 2)
        self.head: nn.Module = nn.Linear(5, 3)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.frozen(x))
        loss = self.head(x).square().mean()
        return loss if self.aux is None else loss + self.aux(x).square().mean()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def linear(out: int) -> nn.Linear:
    layer = nn.Linear(5, out)
    with torch.no_grad():
        for number, param in enumerate(layer.parameters(), 1):
            param.copy_(torch.linspace(-0.1 * number, 0.3, param.numel()).view(param.shape))
    return layer


# --- replaced --------------------------------------------------------------------------------------------------------


def head(net: Net) -> None:
    net.head = linear(3)


def head_of_other_names(net: Net) -> None:
    net.head = nn.Sequential(nn.Dropout(0.0), linear(3))


def layer_in_a_block(net: Net) -> None:
    net.blocks[1][0] = linear(5)


def block(net: Net) -> None:
    net.blocks[2] = nn.Sequential(linear(5), nn.Tanh())


REPLACED: dict[Callable[[Net], None], tuple[str, str]] = {
    head: ("head.weight", "'head.weight'"),
    head_of_other_names: ("head.weight", "'head.1.weight'"),
    layer_in_a_block: ("blocks.1.0.weight", "'blocks.1.0.weight'"),
    block: ("blocks.2.0.weight", "'blocks.2.0.weight'"),
}


@pytest.mark.parametrize(
    ("replace", "options"),
    [
        pytest.param(head, MODES["reduce-scatter"], id="head-reduce-scatter"),
        pytest.param(head_of_other_names, MODES["all-reduce"], id="head_of_other_names-all-reduce"),
        pytest.param(layer_in_a_block, MODES["pooled"], id="layer_in_a_block-pooled"),
        pytest.param(block, MODES["reduce-scatter"], id="block-reduce-scatter"),
    ],
)
def test_replaced_submodule_is_named(replace: Callable[[Net], None], options: dict[str, Any]) -> None:
    """Before every forward, so that catching it once does not help."""
    gone, came = REPLACED[replace]

    def run(rank: int, group: ProcessGroup) -> None:
        net = Net()
        model = DistributedDataParallel(net, DistributedDataParallelConfig(bucket_size=20, **options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(batch(rank, 0)).backward()
        optimizer.step()
        replace(net)
        for _ in range(2):
            with pytest.raises(ParameterChangedError, match=f"'{gone}' was replaced") as caught:
                model(batch(rank, 1))
            assert came in str(caught.value)
            assert "wrap the model again" in str(caught.value)

    run_ranks(2, run)


# --- moved, gone, or come --------------------------------------------------------------------------------------------


def test_added_module_buffers_are_broadcast() -> None:
    def run(rank: int, group: ProcessGroup) -> Tensor:
        net = Net()
        model = DistributedDataParallel(net, process_group=group)
        model(batch(rank, 0)).backward()
        net.norm = nn.BatchNorm1d(5, affine=False)
        model(batch(rank, 1)).backward()
        model(batch(rank, 2)).backward()
        model.eval()
        model(batch(rank, 3))
        return net.norm.running_mean

    first, second = run_ranks(2, run)
    assert torch.equal(first, second)
