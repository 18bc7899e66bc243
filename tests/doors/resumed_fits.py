"""Fits that are interrupted within an epoch and resumed; each reports its trained samples."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from megastrategy.data import ResumableSampler

from .fits import make_strategy, make_trainer
from .rank_processes import Ranks, number_of_ranks

BATCH_SIZE = 3
SEED = 4

Trained = list[tuple[int, list[int]]]
"""Of one rank, by batch: the epoch, and the samples."""


def samples(size: int) -> TensorDataset:
    """The number of each sample, and what it is trained with."""
    features = torch.randn(size, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(torch.arange(size), features)


def resumable_loader(
    size: int, *, batch_sampler: bool = False, drop_last: bool = False, stateful: bool = False, **options: Any
) -> Any:
    """A loader with a sampler or a batch sampler, torch's or (``stateful``) torchdata's."""
    data = samples(size)
    sampler = ResumableSampler(data, seed=SEED)
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, **options)
    if batch_sampler:
        return DataLoader(data, batch_sampler=BatchSampler(sampler, BATCH_SIZE, drop_last), **options)
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, drop_last=drop_last, **options)


class Regression(pl.LightningModule):
    """Reports the samples of its batches."""

    def __init__(self, size: int, *, counts_steps: bool = False, **loader_options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.size, self.counts_steps, self.loader_options = size, counts_steps, loader_options
        self.trained: Trained = []
        self.losses: list[float] = []
        self.batches: list[int] = []

    def train_dataloader(self) -> Any:
        return resumable_loader(self.size, **self.loader_options)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(6), batch_size=BATCH_SIZE)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, features = batch
        loss = self.layers(features).square().mean()
        self.trained.append((self.trainer.current_epoch, numbers.tolist()))
        self.losses.append(loss.item())
        self.batches.append(batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """A hook to save in comes after it."""

    def configure_optimizers(self) -> Any:
        # which makes the loaders before the loops know of the checkpoint
        if self.counts_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Cut(pl.Callback):
    """Saves in the call ``number`` of a hook, and lets the fit end there."""

    def __init__(self, hook: str, number: int, path: str) -> None:
        self.hook, self.left, self.path = hook, number, path
        self.num_trained: int | None = None
        setattr(self, hook, self._cut)

    def _cut(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.sanity_checking:
            return
        self.left -= 1
        if self.left:
            return
        trainer.save_checkpoint(self.path)
        # a batch is trained when Lightning counts it, which is after its step
        is_within = self.hook in ("on_before_optimizer_step", "on_after_backward")
        self.num_trained = len(module.trained) - is_within
        trainer.should_stop = True


@dataclasses.dataclass
class Part:
    """The training of one rank, until the checkpoint if there is one."""

    trained: Trained
    losses: list[float]
    batches: list[int]
    warnings: list[str]


def fit_part(
    size: int,
    *,
    cut: tuple[str, int, str] | None = None,
    resume: str | None = None,
    name: str = "megatron_ddp",
    strategy_options: dict[str, Any] | None = None,
    module_options: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> Part:
    module = Regression(size, **module_options or {})
    callbacks = [] if cut is None else [Cut(*cut)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options: dict[str, Any] = {"devices": number_of_ranks(), "num_sanity_val_steps": 0, **trainer_options}
        trainer = make_trainer(make_strategy(name, **strategy_options or {}), callbacks=callbacks, **options)
        trainer.fit(module, ckpt_path=resume)
    end = callbacks[0].num_trained if callbacks else None
    assert not callbacks or end is not None, "the hook was not called so often"
    return Part(module.trained[:end], module.losses[:end], module.batches[:end], [str(item.message) for item in caught])


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


def path(folder: Path, number: int = 0) -> str:
    return str(folder / f"part-{number}.ckpt")
