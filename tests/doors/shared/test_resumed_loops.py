"""Loops and fits that are cut or stopped train each sample of an epoch once, on any number of ranks."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from megastrategy import SaveOnStop
from megastrategy.data import ResumableSampler

from ..accelerate_loops import Worlds, make_accelerator
from ..fabric_loops import make_fabric
from ..fits import make_strategy, make_trainer
from ..rank_processes import Ranks, number_of_ranks

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
        return StatefulDataLoader(data, batch_size=BATCH_SIZE, sampler=ResumableSampler(data, seed=SEED))

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


def by_epoch(parts: Iterable[Iterable[Any]]) -> dict[int, Counter[int]]:
    """How often each sample was trained in each epoch, by all ranks of all parts."""
    counts: dict[int, Counter[int]] = {}
    for ranks in parts:
        for part in ranks:
            for epoch, numbers in part.trained:
                counts.setdefault(epoch, Counter()).update(numbers)
    return counts


# --- loops that are cut ----------------------------------------------------------------------------------------------


EPOCHS = 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def with_fabric(size: int, file: str, *, sharded: bool = False, **options: Any) -> Part:
    fabric = make_fabric("megatron_ddp", {"state_dict_type": "sharded" if sharded else "full"})
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    has_batches = options.pop("batch_sampler", False)
    loader = resumable_loader(size, batch_sampler=has_batches)
    data = fabric.setup_dataloaders(loader, use_distributed_sampler=not has_batches)
    sampler = data.batch_sampler.sampler if has_batches else data.sampler
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    save, load = functools.partial(fabric.save, file, state), functools.partial(fabric.load, file, state)
    return loop(model, optimizer, sampler, data, fabric.backward, save, load, **options)


def with_accelerate(size: int, folder: str, *, sharded: bool = False, **options: Any) -> Part:
    """The same; the sampler divides, so that the loader is not prepared."""
    accelerator = make_accelerator("megatron_ddp", {"state_dict_type": "sharded" if sharded else "full"})
    has_batches = options.pop("batch_sampler", False)
    model, data = make_model(), resumable_loader(size, batch_sampler=has_batches)
    sampler = data.batch_sampler.sampler if has_batches else data.sampler
    with pytest.raises(ValueError, match=r"Leave its loader out of accelerator\.prepare"):
        accelerator.prepare(data)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.register_for_checkpointing(sampler)
    save, load = (functools.partial(run, folder) for run in (accelerator.save_state, accelerator.load_state))
    return loop(model, optimizer, sampler, data, accelerator.backward, save, load, **options)


def loop(
    model: nn.Module,
    optimizer: Any,
    sampler: ResumableSampler,
    data: Any,
    backward: Callable[[Tensor], None],
    save: Callable[[], Any],
    load: Callable[[], Any],
    *,
    cut: int | None = None,
    resume: bool = False,
) -> Part:
    """Ends after batch ``cut`` of its own, when it has saved."""
    if resume:
        load()
    part = Part([], [])
    while sampler.epoch < EPOCHS:
        epoch = sampler.epoch
        for numbers, features in sampler.batches(data):
            part.trained.append((epoch, numbers.tolist()))
            loss = model(features).square().mean()
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            part.losses.append(loss.item())
            if len(part.trained) == cut:
                save()
                return part
    return part


SIZE = 36
ONCE = Counter(range(SIZE))


def assert_same(first: list[Part], second: list[Part], whole: list[Part]) -> None:
    for begun, ended, expected in zip(first, second, whole, strict=True):
        assert begun.trained + ended.trained == expected.trained
        assert begun.losses + ended.losses == expected.losses


def first_of(epoch: int, number: int) -> Counter[int]:
    """The samples with which an epoch is filled up."""
    sampler = ResumableSampler(samples(SIZE), seed=SEED, num_replicas=1, rank=0)
    sampler.set_epoch(epoch)
    return Counter(list(sampler)[:number])


@pytest.mark.parametrize(("cut", "options"), [(2, {}), (9, {"sharded": True, "batch_sampler": True})])
def test_fabric_goes_on(ranks: Ranks, tmp_path: Path, cut: int, options: dict[str, Any]) -> None:
    """The last batch is short: 19 samples a rank, 7 batches."""
    file = str(tmp_path / "checkpoint")
    whole = ranks.run(with_fabric, 38, file, **options)
    first = ranks.run(with_fabric, 38, file, cut=cut, **options)
    second = ranks.run(with_fabric, 38, file, resume=True, **options)
    assert {epoch: len(part) for epoch, part in by_epoch([whole]).items()} == {0: 38, 1: 38}
    assert_same(first, second, whole)


@pytest.fixture
def pools() -> Iterator[dict[int, Ranks]]:
    """Rank processes by their number."""
    pools = {number: Ranks(number) for number in range(1, 5)}
    yield pools
    for pool in pools.values():
        pool.close()


def test_fabric_goes_on_with_other_numbers_of_ranks(pools: dict[int, Ranks], tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint")
    cuts: list[tuple[int, int | None]] = [(2, 2), (1, 4), (3, 3), (4, None)]
    parts = [
        pools[num_ranks].run(with_fabric, SIZE, file, cut=cut, resume=number > 0)
        for number, (num_ranks, cut) in enumerate(cuts)
    ]
    # 12 on two ranks, 12 on one, 12 on three, and 9 of the next epoch; four ranks lack one for the 27 that are left
    assert by_epoch(parts) == {0: ONCE, 1: ONCE + first_of(1, 1)}


@pytest.mark.parametrize(("cut", "options"), [(2, {}), (9, {"sharded": True, "batch_sampler": True})])
def test_accelerate_goes_on(worlds: Worlds, tmp_path: Path, cut: int, options: dict[str, Any]) -> None:
    folder = str(tmp_path / "state")
    whole = worlds.run(with_accelerate, 38, folder, **options)
    first = worlds.run(with_accelerate, 38, folder, cut=cut, **options)
    second = worlds.run(with_accelerate, 38, folder, resume=True, **options)
    assert_same(first, second, whole)


# --- SaveOnStop: a fit that ends before its time ---------------------------------------------------------------------


@dataclasses.dataclass
class Stopped:
    """The training of one rank.

    Attributes:
        ended_by: the kind of the exception, if one ended it.
        step: the Trainer's count of steps at the end.
        saved: whether this fit wrote the file.
    """

    trained: Trained
    losses: list[float]
    ended_by: str | None
    step: int
    saved: bool


class StopsAfter(pl.Callback):
    """Stops the fit in the end of a batch, or (Ctrl-C) between two."""

    def __init__(self, batch: int, way: str) -> None:
        self.batch, self.way = batch, way

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        is_it = len(pl_module.trained) == self.batch
        if is_it and self.way == "should_stop":
            trainer.should_stop = True
        if is_it and self.way == "SIGTERM" and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if len(pl_module.trained) == self.batch and self.way == "Ctrl-C":
            raise KeyboardInterrupt


def fit_until(
    size: int, folder: str, *, way: str = "", batch: int = 0, resume: bool = False, **options: Any
) -> Stopped:
    """Fits until ``batch`` batches are trained and one way to stop has stopped it; to its end if there is none."""
    module, saver = Regression(size), SaveOnStop(folder)
    options = {"devices": number_of_ranks(), "num_sanity_val_steps": 0, "max_epochs": 3, **options}
    trainer = make_trainer(make_strategy("megatron_ddp"), callbacks=[saver, StopsAfter(batch, way)], **options)
    before = saver.path.stat().st_mtime_ns if saver.path.exists() else 0
    ended_by = None
    try:
        trainer.fit(module, ckpt_path=str(saver.path) if resume else None)
    except (SystemExit, SIGTERMException) as exception:
        ended_by = type(exception).__name__
    saved = saver.path.exists() and saver.path.stat().st_mtime_ns != before
    return Stopped(module.trained, module.losses, ended_by, trainer.global_step, saved)


STOPPED_SIZE = 36  # 6 batches an epoch on 2 ranks


def assert_goes_on(first: list[Stopped], second: list[Stopped], whole: list[Stopped]) -> None:
    """Rank by rank, to the bit."""
    for begun, ended, expected in zip(first, second, whole, strict=True):
        assert begun.saved
        assert begun.step < expected.step
        assert begun.trained + ended.trained == expected.trained
        assert begun.losses + ended.losses == expected.losses
        assert not ended.saved, "it ran to its end"


@pytest.mark.parametrize(
    ("options", "ended_by"),
    [({"max_steps": 8}, None), ({"way": "SIGTERM", "batch": 8}, "SIGTERMException")],
    ids=["max_steps", "SIGTERM"],
)
def test_stopped_fit_goes_on_as_if_not_stopped(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any], ended_by: str | None
) -> None:
    whole = ranks.run(fit_until, STOPPED_SIZE, str(tmp_path / "whole"))
    first = ranks.run(fit_until, STOPPED_SIZE, str(tmp_path), **options)
    assert [part.ended_by for part in first] == [ended_by] * 2
    second = ranks.run(fit_until, STOPPED_SIZE, str(tmp_path), resume=True)
    assert not (tmp_path / "whole").exists(), "a fit that runs to its end saves nothing"
    assert_goes_on(first, second, whole)


def test_ctrl_c_leaves_out_the_batch_it_interrupts(ranks: Ranks, tmp_path: Path) -> None:
    """The loader has handed it over, and no step has taken it."""
    whole = ranks.run(fit_until, STOPPED_SIZE, str(tmp_path / "whole"))
    first = ranks.run(fit_until, STOPPED_SIZE, str(tmp_path), way="Ctrl-C", batch=8)
    second = ranks.run(fit_until, STOPPED_SIZE, str(tmp_path), resume=True)
    for begun, ended, expected in zip(first, second, whole, strict=True):
        assert begun.saved
        assert begun.ended_by == "SystemExit"
        assert begun.trained + expected.trained[8:9] + ended.trained == expected.trained


def test_stop_waits_for_the_step(ranks: Ranks, tmp_path: Path) -> None:
    """The gradients of half a window are in no checkpoint."""
    options = {"accumulate_grad_batches": 3}
    whole = ranks.run(fit_until, STOPPED_SIZE, str(tmp_path), **options)
    first = ranks.run(fit_until, STOPPED_SIZE, str(tmp_path), way="should_stop", batch=7, **options)
    second = ranks.run(fit_until, STOPPED_SIZE, str(tmp_path), resume=True, **options)
    assert [len(part.trained) for part in first] == [9, 9]
    assert_goes_on(first, second, whole)
