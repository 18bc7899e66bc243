"""A small language model, batches with different numbers of tokens, and one process that trains on all of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
VOCABULARY = 17
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class TokenModel(nn.Module):
    """Tied weights, a layer used twice, one that rank 0 alone uses, one that none does. ``forward`` returns the sum of
    the loss over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 11)
        self.twice = nn.Linear(11, 11)
        self.rank_zero = nn.Linear(11, 11, bias=False)
        self.never = nn.Linear(11, 2)
        self.head = nn.Linear(11, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor, rank: int) -> Tensor:
        return F.cross_entropy(self.logits(ids, rank), labels.flatten(), ignore_index=IGNORED, reduction="sum")

    def logits(self, ids: Tensor, rank: int) -> Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(self.embedding(ids)))))
        if rank == 0:
            hidden = hidden + self.rank_zero(hidden)
        return self.head(hidden).flatten(0, 1)


@functools.cache
def _pristine() -> TokenModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return TokenModel()


def token_model() -> TokenModel:
    """A fresh copy, always of the same weights."""
    return copy.deepcopy(_pristine())


_pristine()  # made on the main thread, before any rank runs


def num_tokens(rank: int, step: int, microbatch: int) -> int:
    """From 1 to 40; rank 1 has none in the first microbatch of step 1, and in all of step 2."""
    if rank == 1 and ((step, microbatch) == (1, 0) or step == 2):
        return 0
    return 1 + (13 * rank + 29 * step + 17 * microbatch) % 40


def batch(rank: int, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Ids and labels, (4, 10) each, with :func:`num_tokens` labels that are not ignored."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + rank)
    ids = torch.randint(VOCABULARY, (4, 10), generator=generator)
    labels = torch.randint(VOCABULARY, (4, 10), generator=generator)
    ignored = torch.randperm(40, generator=generator)[num_tokens(rank, step, microbatch) :]
    labels.view(-1)[ignored] = IGNORED
    return ids, labels


def count(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


def train_on_all(
    size: int,
    windows: Sequence[int],
    make_optimizer: MakeOptimizer,
    *,
    dtype: torch.dtype = torch.float32,
    clip_norm: float | None = None,
) -> dict[str, Tensor]:
    """Trains in one process on the mean over the tokens of all ranks; ``windows``: microbatches of each step."""
    module = token_model().to(dtype)
    optimizer = make_optimizer(module)
    for step, microbatches in enumerate(windows):
        optimizer.zero_grad()
        total = 0
        for rank in range(size):
            for microbatch in range(microbatches):
                ids, labels = batch(rank, step, microbatch)
                total += count(labels)
                logits = module.logits(ids, rank)
                F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum").backward()
        for param in module.parameters():
            if param.grad is not None:
                param.grad /= total
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_close(ours: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Within ``relative`` of the largest weight of each parameter."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        difference = (ours[name].double() - value.double()).abs().max().item()
        bound = relative * value.double().abs().max().item()
        assert difference <= bound, f"{name}: {difference:.3g} > {bound:.3g}"
