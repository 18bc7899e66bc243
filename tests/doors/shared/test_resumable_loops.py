"""Loops with Fabric and with Accelerate that are cut train each sample of an epoch once, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megastrategy.data import ResumableSampler

from ..accelerate_loops import Worlds, make_accelerator
from ..fabric_loops import make_fabric
from ..rank_processes import Ranks
from ..resumed_fits import SEED, Part, Pools, by_epoch, resumable_loader, samples

EPOCHS = 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def step(model: nn.Module, features: torch.Tensor, part: Part, optimizer: Any, backward: Any) -> None:
    loss = model(features).square().mean()
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    part.losses.append(loss.item())


def with_fabric(
    size: int, file: str, *, cut: int | None = None, resume: bool = False, sharded: bool = False, **loader: Any
) -> Part:
    """Ends after batch ``cut`` of its own, when it has saved."""
    fabric = make_fabric("megatron_ddp", {"state_dict_type": "sharded" if sharded else "full"})
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = fabric.setup_dataloaders(
        resumable_loader(size, **loader), use_distributed_sampler="batch_sampler" not in loader
    )
    sampler = data.sampler if "batch_sampler" not in loader else data.batch_sampler.sampler
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    if resume:
        fabric.load(file, state)
    part = Part([], [])
    while sampler.epoch < EPOCHS:
        epoch = sampler.epoch
        for numbers, features in sampler.batches(data):
            part.trained.append((epoch, numbers.tolist()))
            step(model, features, part, optimizer, fabric.backward)
            if len(part.trained) == cut:
                fabric.save(file, state)
                return part
    return part


def with_accelerate(
    size: int, folder: str, *, cut: int | None = None, resume: bool = False, sharded: bool = False, **loader: Any
) -> Part:
    """The same; the sampler divides, so that the loader is not prepared."""
    accelerator = make_accelerator("megatron_ddp", {"state_dict_type": "sharded" if sharded else "full"})
    model, data = make_model(), resumable_loader(size, **loader)
    sampler = data.sampler if "batch_sampler" not in loader else data.batch_sampler.sampler
    with pytest.raises(ValueError, match=r"leave its loader out of accelerator\.prepare"):
        accelerator.prepare(data)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.register_for_checkpointing(sampler)
    if resume:
        accelerator.load_state(folder)
    part = Part([], [])
    while sampler.epoch < EPOCHS:
        epoch = sampler.epoch
        for numbers, features in sampler.batches(data):
            part.trained.append((epoch, numbers.tolist()))
            step(model, features, part, optimizer, accelerator.backward)
            if len(part.trained) == cut:
                accelerator.save_state(folder)
                return part
    return part


SIZE = 36
ONCE = Counter(range(SIZE))


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def assert_same(first: list[Part], second: list[Part], whole: list[Part]) -> None:
    for begun, ended, expected in zip(first, second, whole, strict=True):
        assert begun.trained + ended.trained == expected.trained
        assert begun.losses + ended.losses == expected.losses


def first_of(epoch: int, number: int) -> Counter[int]:
    """The samples with which an epoch is filled up."""
    sampler = ResumableSampler(samples(SIZE), seed=SEED, num_replicas=1, rank=0)
    sampler.set_epoch(epoch)
    return Counter(list(sampler)[:number])


@pytest.mark.sample(1)
@pytest.mark.parametrize("cut", [2, 6, 9])
@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"batch_sampler": True}], ids=str)
def test_fabric_goes_on(ranks: Ranks, tmp_path: Path, cut: int, options: dict[str, Any]) -> None:
    """The last batch is short: 19 samples a rank, 7 batches."""
    file = str(tmp_path / "checkpoint")
    whole = ranks.run(with_fabric, 38, file, **options)
    first = ranks.run(with_fabric, 38, file, cut=cut, **options)
    second = ranks.run(with_fabric, 38, file, resume=True, **options)
    assert {epoch: len(part) for epoch, part in by_epoch([whole]).items()} == {0: 38, 1: 38}
    assert_same(first, second, whole)


def test_fabric_goes_on_on_other_numbers_of_ranks(pools: Pools, tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint")
    cuts: list[tuple[int, int | None]] = [(2, 2), (1, 4), (3, 3), (4, None)]
    parts = [
        pools.run(num_ranks, with_fabric, SIZE, file, cut=cut, resume=number > 0)
        for number, (num_ranks, cut) in enumerate(cuts)
    ]
    # 12 on two ranks, 12 on one, 12 on three, and 9 of the next epoch; four ranks lack one for the 27 that are left
    assert by_epoch(parts) == {0: ONCE, 1: ONCE + first_of(1, 1)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("cut", [2, 6, 9])
@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"batch_sampler": True}], ids=str)
def test_accelerate_goes_on(worlds: Worlds, tmp_path: Path, cut: int, options: dict[str, Any]) -> None:
    folder = str(tmp_path / "state")
    whole = worlds.run(with_accelerate, 38, folder, **options)
    first = worlds.run(with_accelerate, 38, folder, cut=cut, **options)
    second = worlds.run(with_accelerate, 38, folder, resume=True, **options)
    assert_same(first, second, whole)


def test_accelerate_goes_on_on_other_numbers_of_processes(worlds: Worlds, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    parts = []
    for number, (size, cut) in enumerate([(2, 2), (1, 4), (3, 3), (4, None)]):
        parts.append(worlds.run(with_accelerate, SIZE, folder, size=size, cut=cut, resume=number > 0))
    assert by_epoch(parts) == {0: ONCE, 1: ONCE + first_of(1, 1)}
