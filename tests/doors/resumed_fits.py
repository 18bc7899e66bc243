"""Fits that are interrupted within an epoch and resumed; each reports its trained samples."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from megastrategy.data import ResumableSampler

from ..support.stateful_loader import StatefulLoader
from .rank_processes import Ranks

BATCH_SIZE = 3
SEED = 4

Trained = list[tuple[int, list[int]]]
"""Of one rank, by batch: the epoch, and the samples."""


def samples(size: int) -> TensorDataset:
    """The number of each sample, and what it is trained with."""
    features = torch.randn(size, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(torch.arange(size), features)


def resumable_loader(size: int, *, batch_sampler: bool = False, **options: Any) -> Any:
    """A loader with a sampler or a batch sampler."""
    data = samples(size)
    sampler = ResumableSampler(data, seed=SEED)
    if batch_sampler:
        return DataLoader(data, batch_sampler=BatchSampler(sampler, BATCH_SIZE, False), **options)
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, **options)


class Regression(pl.LightningModule):
    """Reports the samples of its batches."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.size = size
        self.trained: Trained = []
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        data = samples(self.size)
        return StatefulLoader(data, batch_size=BATCH_SIZE, sampler=ResumableSampler(data, seed=SEED))

    def val_dataloader(self) -> Any:
        return DataLoader(samples(6), batch_size=BATCH_SIZE)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, features = batch
        loss = self.layers(features).square().mean()
        self.trained.append((self.trainer.current_epoch, numbers.tolist()))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """A hook to save in comes after it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@dataclasses.dataclass
class Part:
    """The training of one rank, until the checkpoint if there is one."""

    trained: Trained
    losses: list[float]


class Pools:
    """Rank processes, by their number."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def run(self, num_ranks: int, *arguments: Any, **options: Any) -> list[Any]:
        return self._pools.setdefault(num_ranks, Ranks(num_ranks)).run(*arguments, **options)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def by_epoch(parts: Iterable[Iterable[Any]]) -> dict[int, Counter[int]]:
    """How often each sample was trained in each epoch, by all ranks of all parts."""
    counts: dict[int, Counter[int]] = {}
    for ranks in parts:
        for part in ranks:
            for epoch, numbers in part.trained:
                counts.setdefault(epoch, Counter()).update(numbers)
    return counts
