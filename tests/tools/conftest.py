"""Checkpoints that trainings wrote, for all tests of the tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doors.fits import BATCHES_PER_EPOCH, AwkwardModule, Fit
from tests.doors.lightning.test_lightning_checkpoints import amsgrad_in_groups, decay, fit_and_save, small_steps
from tests.doors.rank_processes import Ranks

SHARDED = {"strategy_options": {"state_dict_type": "sharded"}}
NAME = f"step={BATCHES_PER_EPOCH}.ckpt"


def in_groups() -> AwkwardModule:
    """The code of the runs below: groups in another order than the weights, one of them empty."""
    return AwkwardModule(amsgrad_in_groups, decay, "step")


@dataclasses.dataclass(frozen=True)
class Saved:
    """A run's state half-way and at the end, by rank."""

    path: Path
    whole: list[Fit]


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    """Two processes that run a function under ``Trainer(devices=2)``."""
    pool = Ranks()
    yield pool
    pool.close()


def save(ranks: Ranks, folder: Path, strategy: str, optimizer: Any, **options: Any) -> Saved:
    whole = ranks.run(fit_and_save, strategy, str(folder), optimizer, every=BATCHES_PER_EPOCH, **options)
    return Saved(folder / NAME, whole)


@pytest.fixture(scope="package")
def directory(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Sharded, by two ranks."""
    return save(ranks, tmp_path_factory.mktemp("directory"), "megatron_ddp", amsgrad_in_groups, **SHARDED)


@pytest.fixture(scope="package")
def file(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One file, by "ddp"."""
    return save(ranks, tmp_path_factory.mktemp("file"), "ddp", amsgrad_in_groups)


@pytest.fixture(scope="package")
def bf16(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """bf16 weights, with main params: the same run saved both ways."""
    return {
        kind: save(
            ranks,
            tmp_path_factory.mktemp(f"bf16_{kind}"),
            "megatron_ddp",
            small_steps,
            precision="bf16-true",
            strategy_options={"state_dict_type": kind},
        )
        for kind in ("sharded", "full")
    }
