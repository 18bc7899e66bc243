"""A model whose layers run in another order than they were registered in, and its optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig
from megastrategy.core.events import Event, EventKind
from tests.support.doubles import RecordingCollectives

BUCKET_SIZE = 150


class Layers(nn.Module):
    """Six layers (widths 9 to 15, so that nothing is a multiple of anything) on a sum of what came before; with
    ``reverse`` the one that is registered last runs first. ``order`` is the order in which they run, by registration.
    """

    def __init__(self, *, reverse: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(13, 13, dtype=dtype) for _ in range(6))
        self.scale = nn.Parameter(torch.tensor(0.9, dtype=dtype))
        self.never = nn.Linear(3, 5, dtype=dtype)
        self.order = list(range(6))[:: -1 if reverse else 1]
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = x + torch.tanh(self.layers[number](x))
        return (self.scale * x).float().square().mean()


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 13, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def moves(events: list[Event]) -> int:
    return sum(event.kind is EventKind.LAYOUT_CHANGED for event in events)


def wrap(
    group: ProcessGroup, module: nn.Module, **options: Any
) -> tuple[DistributedDataParallel, list[Event], RecordingCollectives]:
    events: list[Event] = []
    collectives = RecordingCollectives(group)
    config = DistributedDataParallelConfig(**{"bucket_size": BUCKET_SIZE, **options})
    model = DistributedDataParallel(module, config, collectives=collectives, listener=events.append)
    return model, events, collectives


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    made = [{"params": params[::3]}, {"params": []}, {"params": params[1::3], "lr": 0.05}, {"params": params[2::3]}]
    return torch.optim.AdamW(made, lr=0.02)
