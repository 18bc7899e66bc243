"""Models that sections train: small, and each with what has broken data parallelism somewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..cases import gpt

SEED = 20


class Model(nn.Module):
    """A model with data of its own. ``forward`` takes a sample, the step and the rank, and returns a scalar loss."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """A microbatch, on the host."""
        return torch.randn(4, 13, generator=generator)


class Awkward(Model):
    """A model with awkward parts: a tied weight, a frozen layer, a scalar, odd sizes, a layer used twice, a branch on
    odd steps, one on rank 0, BatchNorm, a layer never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(13)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(13, 13)
        self.odd_steps = nn.Linear(13, 13)
        self.rank_zero = nn.Linear(13, 13, bias=False)
        self.never = nn.Linear(13, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.embedding = nn.Embedding(17, 13)
        self.head = nn.Linear(13, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        tokens = (x.float().abs().sum(dim=1) * 7).long() % 17
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(self.frozen(self.norm(x))))))
        if step % 2 == 1:
            hidden = hidden + self.odd_steps(hidden)
        if rank == 0:
            hidden = hidden + self.rank_zero(hidden)
        hidden = self.scale * hidden + self.embedding(tokens)
        return F.cross_entropy(self.head(hidden).float(), (tokens + 1) % 17)


class Chain(Model):
    """Linear layers in a row, all of them used."""

    def __init__(self, width: int = 13, depth: int = 4) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def sample(self, generator: torch.Generator) -> Tensor:
        return torch.randn(4, self.width, generator=generator)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


class Twice(Chain):
    """A layer in two re-entrant checkpoints: its gradient comes in two parts, the second after its bucket was sent."""

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        x = self.layers[0](x)
        for layer in (self.layers[1], self.layers[2], self.layers[1], self.layers[3]):
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=True)
        return x.float().square().mean()


class Gpt(Model):
    """A language model; registered in reverse its first backward moves all buckets.

    Args:
        size: vocabulary, context, width, depth.
        batch: sequences a microbatch.
    """

    def __init__(
        self, size: tuple[int, int, int, int] = (64, 16, 64, 2), batch: int = 2, *, registered_in_reverse: bool = False
    ) -> None:
        super().__init__()
        self.size, self.batch = size, batch
        self.model = gpt(*size, registered_in_reverse=registered_in_reverse)

    def sample(self, generator: torch.Generator) -> Tensor:
        vocabulary, context, *_ = self.size
        return torch.randint(vocabulary, (self.batch, context + 1), generator=generator)

    def forward(self, tokens: Tensor, step: int = 0, rank: int = 0) -> Tensor:
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Recurrent(Model):
    """An LSTM and a GRU, whose weights cuDNN wants in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(13, 24, num_layers=2, batch_first=True)
        self.gru = nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 1)

    def sample(self, generator: torch.Generator) -> Tensor:
        return torch.randn(4, 6, 13, generator=generator)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        hidden, _ = self.lstm(x)
        hidden, _ = self.gru(hidden)
        return self.head(hidden).float().square().mean()


class Branches(Model):
    """Two branches with parameters of their own, and one that both use; the second on ``side_stream``, if there is one.

    Attributes:
        streams: as a device has them.
        side_stream: set by the training loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Linear(13, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.shared, self.head = nn.Linear(64, 64), nn.Linear(64, 1)
        self.streams: Any = None
        self.side_stream: Any = None

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        if self.side_stream is None:
            second = torch.tanh(self.two(torch.tanh(self.shared(hidden))))
        else:
            main = self.streams.current_stream()
            self.side_stream.wait_stream(main)
            with self.streams.stream(self.side_stream):
                second = torch.tanh(self.two(torch.tanh(self.shared(hidden))))
            main.wait_stream(self.side_stream)
        first = torch.tanh(self.one(torch.tanh(self.shared(hidden))))
        return self.head(first + second).float().square().mean()


MODELS: dict[str, Callable[[], Model]] = {
    "awkward": Awkward,
    "chain": Chain,
    "twice": Twice,
    "gpt": Gpt,
    "gpt-wide": lambda: Gpt((50257, 128, 768, 2)),
    "gpt-reversed": lambda: Gpt(registered_in_reverse=True),
    "recurrent": Recurrent,
    "branches": Branches,
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> Model:
    """Always of the same weights."""
    torch.manual_seed(SEED)
    return MODELS[name]().to(dtype)


def microbatch(model: Model, rank: int, step: int, number: int, dtype: torch.dtype) -> Tensor:
    """Depends on nothing else; on the host."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + 1_009 * step + number)
    x = model.sample(generator)
    return x.to(dtype) if x.is_floating_point() else x
