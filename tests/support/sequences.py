"""A model whose ranks have parts of one sequence each, its loss, and one process that trains on whole sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from .ragged_tokens import IGNORED, count


def summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The sum of the loss over labels, and their number."""
    each = functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return each, count(targets)


class Gathered(torch.autograd.Function):
    """The parts of a sequence on all ranks of a group; their gradients come back to the ranks that have them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


class Attention(nn.Module):
    """Every place of a sequence sees all of it; ``gather`` completes what this rank has of the keys."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed, self.query, self.key = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.value, self.head = nn.Linear(8, 8), nn.Linear(8, 11)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.5

    def forward(self, ids: Tensor, gather: Any = lambda part: part) -> Tensor:
        hidden = self.embed(ids)
        keys, values = gather(self.key(hidden)), gather(self.value(hidden))
        logits: Tensor = self.head(torch.tanh(torch.softmax(self.query(hidden) @ keys.T, -1) @ values))
        return logits


def train_on_whole_sequences(
    module: Attention, optimizer: torch.optim.Optimizer, steps: Iterable[Sequence[tuple[Tensor, Tensor]]]
) -> dict[str, Tensor]:
    """Trains in one process on the mean over all labels of a step, clips to 0.1, and returns the weights.

    ``steps``: ids and labels of the sequences of each step.
    """
    for sequences in steps:
        optimizer.zero_grad()
        total = sum(count(labels) for _, labels in sequences)
        for ids, labels in sequences:
            each = functional.cross_entropy(module(ids), labels, ignore_index=IGNORED, reduction="sum")
            (each / total).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
