"""Replicas of an unmodified Trainer: processes that are killed and come back."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megastrategy import Replicas
from megastrategy.data import ResumableSampler
from megastrategy.lightning import MegatronDDPStrategy, SaveOnStop
from tests.support.replica_processes import Kill, logged_steps, run_with_kills
from tests.support.replica_trainer import Batches, Fit, Module
from tests.support.replicas import OPTIMIZERS, Case, assert_equal, members_by_step

from .test_kills import check

# --- a kill at any point ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Where:
    """A kill of replica 1, and how the Trainer validates."""

    point: str
    step: int = 3
    ranks: int = 1
    val_check_interval: float = 1.0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "where",
    [
        Where("before meeting", ranks=2),
        Where("after meeting"),
        Where("after backward", ranks=2),
        Where("before sum 0"),
        Where("after sum 1", ranks=2),
        Where("before vote"),
        Where("after vote", ranks=2),
        Where("after step", val_check_interval=0.5, ranks=2),
        Where("after step", step=10),
        Where("before meeting", step=11),
        Where("validating", step=6, val_check_interval=0.5),
    ],
    ids=lambda where: f"{where.point}-{where.step}-{where.ranks}",
)
def test_a_fit_is_equal_to_a_replay_with_the_same_replicas(where: Where, tmp_path: Path) -> None:
    """The batches of one that comes back begin at the others', within an epoch, at its border, in a validation."""
    case = Case(ranks=where.ranks, num_epochs=2, num_batches=10)
    fit = Fit(options={"val_check_interval": where.val_check_interval})
    steps = check(case, [Kill(1, where.ranks - 1, where.point, where.step)], tmp_path, train=fit)
    assert (0,) in steps.values(), "the other one went on alone"
    assert steps[1, 9] == (0, 1), "it came back"


@pytest.mark.long
def test_a_replica_that_was_stopped_ends_and_comes_back(tmp_path: Path) -> None:
    case = Case(num_epochs=2, num_batches=8)
    kills = [Kill(1, 0, "before sum 0", step=3, stopped_s=14.0)]
    steps = check(case, kills, tmp_path, train=Fit(), skew_s=5.0)
    assert (0,) in steps.values()
    assert steps[1, 7] == (0, 1)


# --- loops, schedules, callbacks -------------------------------------------------------------------------------------


class Scheduled(Module):
    """Two schedules, one by step and one by a monitored value, that stops improving soon."""

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS["momentum"](self.module.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


def stopping(folder: Path) -> list[pl.Callback]:
    return [
        EarlyStopping("val_loss", patience=6, min_delta=0.02),
        ModelCheckpoint(folder / "saved", monitor="val_loss", save_top_k=2, save_last=True),
        WeightAveraging(),  # the module has the average after the fit
        ModelCheckpoint(folder / "each", every_n_train_steps=1, save_top_k=1),  # not again after a microbatch
    ]


def test_loops_schedules_and_callbacks_of_one_that_comes_back_are_the_others(tmp_path: Path) -> None:
    case = Case("momentum", num_epochs=20, num_batches=8)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 0.5, "gradient_clip_val": 0.5}
    fit = Fit(Scheduled, callbacks=stopping, options=options)
    found = run_with_kills(case, [Kill(1, 0, "after backward", step=2)], tmp_path, train=fit)
    one, other = found[0][0], found[1][0]
    assert_equal(one, other)
    for name in ("counters", "schedules", "callbacks"):
        assert one[name] == other[name], name
    steps = members_by_step(logged_steps(tmp_path))
    assert {(0,), (0, 1)} <= set(steps.values())
    assert one["counters"][0] < case.num_epochs, "it was stopped early"
    assert not (tmp_path / "ready-1-0-2").exists(), "a difference would end it, and it would take the state once more"
    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    best = one["callbacks"][_key(one, "ModelCheckpoint{'monitor': 'val")]["best_k_models"]
    assert {Path(path).name for path in best} <= saved
    assert "last.ckpt" in saved
    assert len(saved) == 3


def _key(outcome: dict[str, Any], name: str) -> str:
    [found] = [key for key in outcome["callbacks"] if key.startswith(name)]
    return found


class Differing(Module):
    """Its monitored value improves in one replica, and in the other it does not."""

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", -float(self.trainer.global_step) if self.slot else 1.0)


def stopping_soon(folder: Path) -> list[pl.Callback]:
    return [EarlyStopping("val_loss", patience=1), ModelCheckpoint(folder, monitor="val_loss")]


def test_all_replicas_stop_if_one_does(tmp_path: Path) -> None:
    case = Case(num_epochs=9, num_batches=4)
    found = run_with_kills(case, [], tmp_path, train=Fit(Differing, stopping_soon, waits=False))
    one, other = found[0][0], found[1][0]
    assert_equal(one, other)
    assert one["counters"] == other["counters"] == (2, 8)
    # Each would have saved in other epochs: they save where all would.
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0-step=4.ckpt"]


# --- checkpoints -----------------------------------------------------------------------------------------------------


def stop_saving(folder: Path) -> list[pl.Callback]:
    return [SaveOnStop(folder)]


def test_sigterm_ends_one_replica_which_saves_if_it_leads(tmp_path: Path) -> None:
    case = Case(ranks=2, num_epochs=2, num_batches=10)
    kills = [Kill(0, 1, "after step", step=4, signum=signal.SIGTERM)]
    steps = check(case, kills, tmp_path, train=Fit(callbacks=stop_saving))
    assert (1,) in steps.values()
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=False)["global_step"] == 4


class Placed(Batches):
    """Batches that begin again where a checkpoint was saved."""

    place = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.place % self.case.num_batches, self.case.num_batches):
            self.place = number + 1
            yield self.case.batch(self.sampler.epoch, number, self.slot, self.rank)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class WithPlace(Module):
    def train_dataloader(self) -> Any:
        return Placed(self.case, self.slot, self.rank)


@pytest.mark.long
def test_sigterm_ends_all_replicas_which_go_on_from_the_leaders_file(tmp_path: Path) -> None:
    """As at the end of a scheduler's allocation."""
    case = Case(ranks=2, num_epochs=2, num_batches=10)
    kills = [Kill(slot, 1, "after step", step=14, signum=signal.SIGTERM) for slot in (0, 1)]
    fit = Fit(WithPlace, callbacks=stop_saving, ckpt_path=tmp_path / "stopped.ckpt")
    steps = check(case, kills, tmp_path, train=fit)
    assert set(steps.values()) == {(0, 1)}
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=False)["global_step"] == 14
    assert (tmp_path / "ready-0-0-1").exists(), "it was started again"


# --- data and logs ---------------------------------------------------------------------------------------------------


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


class Sampling(Module):
    """Writes down which samples it trains with. A worker has read ahead before the epoch is known."""

    def train_dataloader(self) -> Any:
        return DataLoader(Numbered(), batch_size=3, shuffle=True, num_workers=1, multiprocessing_context="fork")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        indices, inputs = batch
        with (self.folder / f"seen-{self.slot}-{self.rank}").open("a") as file:
            file.write(f"{self.current_epoch} {batch_idx} {indices.tolist()}\n")
        return super().training_step(inputs)


class Resuming(Sampling):
    def train_dataloader(self) -> Any:
        sampler = ResumableSampler(Numbered())
        return DataLoader(Numbered(), batch_size=3, sampler=sampler, num_workers=1, multiprocessing_context="fork")


def _expected(kind: type[Sampling], epoch: int, place: int) -> list[int]:
    if kind is Sampling:
        usual: Any = DistributedSampler(Numbered(), 4, place)
    else:
        usual = ResumableSampler(Numbered())
        usual.divide(4, place)
    usual.set_epoch(epoch)
    return list(usual)


@pytest.mark.parametrize("kind", [Sampling, pytest.param(Resuming, marks=pytest.mark.long)])
def test_each_replica_has_its_own_samples_and_logs(kind: type[Sampling], tmp_path: Path) -> None:
    case = Case(ranks=2, num_epochs=2, num_batches=6)
    options = {"use_distributed_sampler": True, "logger": True, "enable_checkpointing": True}
    kills = [Kill(1, 0, "after backward", step=8)]  # in the second epoch, whose order a worker cannot know
    found = run_with_kills(case, kills, tmp_path, train=Fit(kind, options=options))
    for mine, theirs in zip(found[0], found[1], strict=True):
        assert_equal(mine, theirs)
    for slot, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        lines = (tmp_path / f"seen-{slot}-{rank}").read_text().splitlines()
        assert len(lines) == 12 if slot == 0 else len(lines) >= 8
        for line in lines:
            epoch, batch, indices = line.split(" ", 2)
            start = 3 * int(batch)
            expected = _expected(kind, int(epoch), 2 * slot + rank)[start : start + 3]
            assert indices == str(expected)
    logs = sorted(path.name.partition("-")[0] for path in (tmp_path / "lightning_logs").iterdir())
    assert logs == ["replica0", "replica1", "replica1"], "each process logs in a folder of its own"
    [leading] = (tmp_path / "lightning_logs").glob("*/checkpoints")
    assert leading.parent.name.startswith("replica0")
    assert [path.name for path in leading.iterdir()] == ["epoch=1-step=12.ckpt"]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [LearningRateFinder, functools.partial(StochasticWeightAveraging, swa_lrs=0.1)])
def test_callbacks_that_cannot_be_used_are_refused(callback: Any, tmp_path: Path) -> None:
    replicas = Replicas(of=2, slot=0, lighthouse="http://localhost:1")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronDDPStrategy(replicas=replicas),
        max_epochs=1,
        default_root_dir=tmp_path,
        logger=False,
        callbacks=[one := callback()],
    )
    try:
        with pytest.raises(ValueError, match=rf"replicas=: the callback {type(one).__name__} cannot be used"):
            trainer.fit(Module(Case(), 0, 0))
    finally:
        torch.distributed.destroy_process_group()  # other tests of this process begin without one
