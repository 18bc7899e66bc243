"""Optimizers that need whole parameters, and training with them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig
from tests.support import optimizers
from tests.support.models import two_layers
from tests.support.training import Outcome, Run

SOME = 200


def by_dimensions(params: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest."""
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def muon_and_adamw_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices, rest = by_dimensions(params)
    return optimizers.MatricesAndRest([{"params": matrices, "by_row": True}, {"params": rest}])


def replicated_and_flat_groups(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Every rank steps one group, in another order than the model's, on which the last bit of a sum depends."""
    first, flat, *others = params
    groups = [
        {"params": [*others, first], "by_norm": True, "sharding": "replicated"},
        {"params": [flat], "sharding": "flat"},
    ]
    return optimizers.NormalisedGroups(groups, lr=0.02, by_norm=False)


KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "muon": lambda params: torch.optim.Muon(by_dimensions(params)[0], lr=0.02),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "lamb": lambda params: optimizers.LambWithMoments(params, lr=0.02),
    "shampoo": lambda params: optimizers.Shampoo(params, lr=0.02),
    "muon_and_adamw": muon_and_adamw_groups,
    "replicated_and_flat": replicated_and_flat_groups,
    "counts_calls": lambda params: optimizers.CountsCalls(params, lr=0.02),
}


@dataclasses.dataclass(frozen=True)
class WholeRun(Run):
    kind: str = "muon"

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        params = [param for param in model.parameters() if param.requires_grad]
        return KINDS[self.kind](params)


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, whatever state consists of."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        alike = isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple | deque) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_same(ours: list[Outcome], reference: list[Outcome]) -> None:
    for rank, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        for name, value in theirs.weights.items():
            assert torch.equal(mine.weights[name], value), f"rank {rank}: {name}"
            assert mine.weights[name].stride() == value.stride(), f"rank {rank}: strides of {name}"
        assert mine.losses == theirs.losses, f"rank {rank}"
    assert same(ours[0].optimizer_state, reference[0].optimizer_state)


def model_on(
    group: ProcessGroup, dtype: torch.dtype = torch.float32, width: int = 33, **options: Any
) -> tuple[nn.Sequential, DistributedDataParallel]:
    module = two_layers(width).to(dtype)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=SOME, **options), group)
    return module, model


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def train(model: DistributedDataParallel, optimizer: Any, rank: int, steps: range, accumulate: int = 1) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        for microbatch in range(1, accumulate):
            with model.no_sync():
                model(batch(rank, step + 50 * microbatch, dtype)).square().mean().backward()
        model(batch(rank, step, dtype)).square().mean().backward()
        optimizer.step()
