"""The model that everything is compared on: one of each thing that breaks data parallelism somewhere."""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AwkwardModel(nn.Module):
    """A model with awkward parts: tied weight, frozen layer, scalar, odd sizes, a layer used twice, a branch on odd
    steps and one on rank 0, BatchNorm, a channels_last convolution, a layer never used.

    ``forward`` takes images (batch, 3, 6, 6), the step and the rank, and returns a scalar loss.
    """

    def __init__(self) -> None:
        super().__init__()
        # without bias: BatchNorm takes it out again, so its gradient would be rounding error and nothing else
        self.conv = nn.Conv2d(3, 5, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.frozen = nn.Linear(5, 13)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(13, 13)
        self.odd_steps = nn.Linear(13, 13)
        self.rank_zero = nn.Linear(13, 13, bias=False)
        self.never = nn.Linear(13, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.embedding = nn.Embedding(17, 13)
        self.head = nn.Linear(13, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, images: Tensor, step: int, rank: int) -> Tensor:
        hidden = torch.tanh(self.norm(self.conv(images))).mean(dim=(2, 3))
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(self.frozen(hidden)))))
        if step % 2 == 1:
            hidden = hidden + self.odd_steps(hidden)
        if rank == 0:
            hidden = hidden + self.rank_zero(hidden)
        tokens = (images.abs().sum(dim=(1, 2, 3)) * 7).long() % 17
        hidden = self.scale * hidden + self.embedding(tokens)
        return F.cross_entropy(self.head(hidden), (tokens + 1) % 17)


@functools.cache
def _pristine() -> AwkwardModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AwkwardModel()


def awkward_model() -> AwkwardModel:
    """A fresh copy, always of the same weights; no global generator is touched."""
    return copy.deepcopy(_pristine())


_pristine()  # made on the main thread, before any rank runs


def images(rank: int, step: int, microbatch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Four images that depend on rank, step and microbatch alone."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + 1_009 * step + microbatch)
    return torch.randn(4, 3, 6, 6, generator=generator).to(dtype)


class WholeGrads(nn.Module):
    """Gradients that are integers for any weights. Their sums and means over 2**k ranks are exact in any order, in 16
    bits too. The second layer is used on odd steps, the third on rank 1 only.

    ``forward`` takes whole numbers (batch, 33), the step and the rank, and returns a scalar loss; a module buffer adds
    up what it has seen. The weights' values are the same in every dtype.
    """

    total: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.always, self.odd = nn.Linear(33, 5), nn.Linear(33, 7)
        self.rank_one, self.never = nn.Linear(33, 3, bias=False), nn.Linear(3, 2)
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator).bfloat16().to(dtype)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        self.total += x.detach().long().sum()
        loss = self.always(x).sum()
        loss = loss + 2 * self.odd(x).sum() if step % 2 else loss
        return loss + 4 * self.rank_one(x).sum() if rank == 1 else loss


def whole_numbers(
    rank: int, step: int, microbatch: int, dtype: torch.dtype, *, batch: int = 2, largest: int = 4
) -> Tensor:
    """(batch, 33) whole numbers from ``-largest`` to ``largest``, that depend on rank, step and microbatch alone."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + microbatch)
    return torch.randint(-largest, largest + 1, (batch, 33), generator=generator).to(dtype)


def two_layers(width: int = 33) -> nn.Sequential:
    """10 -> width -> 7 with tanh: the smallest model with several parameters; the same weights at each call."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 7))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model
