"""A rank that leaves out a batch or a collective: all notice, and none waits for the process group's timeout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from megastrategy._faults.recovery import PATIENCE
from megastrategy.core.collectives import process_groups
from megastrategy.core.errors import CollectiveError
from tests.doors.features.manual import Manual

from ..fabric_loops import make_fabric
from ..fits import AwkwardModule, assert_same_tensors, fit, loader, make_strategy, make_trainer
from ..rank_processes import Ranks, assert_failed


class LeavesOut(Manual):
    """``training_step`` returns None before the backward in batch 3, on rank 0 alone."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        if batch_idx == 3 and self.trainer.global_rank == 0:
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def fit_leaving_out() -> None:
    fit("megatron_ddp", module=LeavesOut(), strategy_options={"timeout": timedelta(seconds=5)})


def test_batch_left_out_by_a_rank_ends_all_at_timeout(ranks: Ranks) -> None:
    """It waits before the next batch, the other one for its gradients; so they do under "ddp"."""
    ranks.close()  # fits of one process share their groups, which have the timeout of the first
    for outcome in ranks.outcomes(fit_leaving_out):
        assert_failed(outcome, kind="CollectiveError", within_s=30)


class Batches(IterableDataset[Tensor]):
    """One batch of 4 more on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(16 + 4 * (torch.distributed.get_rank() == self.rank)):
            yield torch.ones(8)


class StopsEarly(pl.LightningModule):
    """Rank 0 has fewer batches, or decides by itself to stop."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self.stops = stops
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.stops and self.global_rank == 0 and batch_idx == 1:
            self.trainer.should_stop = True
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit_ending_early(stops: bool) -> str:
    """Returns the error, or an empty string."""
    data = DataLoader(torch.ones(32, 8), batch_size=4) if stops else DataLoader(Batches(rank=1), batch_size=4)
    try:
        make_trainer(make_strategy("megatron_ddp"), max_epochs=1).fit(StopsEarly(stops), data)
    except CollectiveError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("stops", "num_steps"), [(True, 2), (False, 4)])
def test_fit_ending_early_on_a_rank_is_named(ranks: Ranks, stops: bool, num_steps: int) -> None:
    """Under "ddp" the other ranks wait for half an hour."""
    ended, waited = ranks.run(fit_ending_early, stops)
    assert ended == ""
    assert f"rank 0 has ended its fit after {num_steps} steps, and this rank goes on" in waited
    assert "should_stop" in waited
    assert "drop_last" in waited


def fit_fewer_batches_and_exit() -> str:
    """Returns rank 0's error with its notes; the process of rank 1 ends after its fit."""
    try:
        fit_batches = DataLoader(Batches(rank=0), batch_size=4)
        make_trainer(make_strategy("megatron_ddp"), max_epochs=1).fit(StopsEarly(stops=False), fit_batches)
    except CollectiveError as error:
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    os._exit(0)


def test_fit_ending_early_with_its_process_is_named(ranks: Ranks) -> None:
    """A script is over after its fit: the connection ends before anybody has looked for the reason."""
    waited, _ = ranks.outcomes(fit_fewer_batches_and_exit)
    assert "rank 1 has ended its fit after 4 steps, and this rank goes on" in waited


class OutlivesTheStore(pl.Callback):
    """Rank 1 tears its run down after the process of rank 0, which has the key-value store, has ended."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        store = torch.distributed.distributed_c10d._get_default_store()
        while trainer.global_rank == 1:
            try:
                store.num_keys()
            except torch.distributed.DistNetworkError:
                return


def fit_and_exit() -> int:
    trainer = make_trainer(make_strategy("megatron_ddp"), max_epochs=1, callbacks=[OutlivesTheStore()])
    trainer.fit(StopsEarly(stops=False), DataLoader(torch.ones(32, 8), batch_size=4))
    if trainer.global_rank == 0:
        os._exit(0)
    return trainer.global_step


def test_fit_ends_well_after_rank_0_has_exited(ranks: Ranks) -> None:
    _, num_steps = ranks.outcomes(fit_and_exit)
    assert num_steps == 4


def test_fit_ending_early_leaves_no_rank_waiting(ranks: Ranks) -> None:
    """Rank 0 begins its next fit, which rank 1 never comes to: its process ends."""
    ended, waited = ranks.outcomes(fit_ending_early_and_raising)
    assert_failed(waited, "rank 0 has ended its fit after 2 steps", kind="CollectiveError", within_s=30)
    assert_failed(ended, "another rank does not come to this run", "all-reduce was given up", within_s=30)


def fit_ending_early_and_raising() -> None:
    data = DataLoader(torch.ones(32, 8), batch_size=4)
    for stops in (True, False):
        make_trainer(make_strategy("megatron_ddp"), max_epochs=1).fit(StopsEarly(stops), data)


def loop_after_a_fit() -> None:
    make_trainer(make_strategy("megatron_ddp"), max_epochs=1).fit(StopsEarly(stops=False), DataLoader(torch.ones(8, 8)))
    fabric = make_fabric("megatron_ddp", {})
    layer = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(layer, torch.optim.AdamW(layer.parameters()))
    time.sleep(2.5 * fabric.global_rank)
    fabric.backward(model(torch.ones(1, 8)).sum())
    optimizer.step()


def test_slow_rank_after_a_fit_has_not_ended_early(ranks: Ranks) -> None:
    ranks.run(loop_after_a_fit)


class ForRankZeroOnly(AwkwardModule):
    """Code that is not for all ranks, although it waits for all."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_fit_start(self) -> None:
        if self.what == "reduce" and self.global_rank == 0:
            self.trainer.strategy.reduce(torch.ones(1))

    def on_train_epoch_end(self) -> None:
        if self.what == "log" and self.global_rank == 0:
            self.log("number", 1.0, sync_dist=True)


REDUCES, ENDS = "calls reduce() of the strategy", "comes to its next batch, or to the end of its fit"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("log", [f"this rank {REDUCES}, and another {ENDS}", f"this rank {ENDS}, and another {REDUCES}"]),
        (
            "reduce",
            [
                f"this rank calls {mine}() of the strategy, and another calls {theirs}() of the strategy"
                for mine, theirs in (("reduce", "barrier"), ("barrier", "reduce"))
            ],
        ),
    ],
)
def test_collective_for_one_rank_is_noticed_by_all(ranks: Ranks, what: str, said: list[str]) -> None:
    """Under "ddp" it is taken for whichever comes next on the other rank: that ends the processes, or both wait."""
    for expected, message in zip(said, ranks.run(fit_for_rank_zero_only, what), strict=True):
        assert expected in message
        assert "sync_dist=True" in message


def fit_for_rank_zero_only(what: str) -> str:
    with pytest.raises(CollectiveError) as raised:
        fit("megatron_ddp", module=ForRankZeroOnly(what))
    assert_same_tensors(fit("megatron_ddp").weights, fit("ddp").weights)
    return str(raised.value)


# --- ranks that die --------------------------------------------------------------------------------------------------


class DiesOnRank1(pl.Callback):
    """Before batch 2, or after the first batch while the others save: on their way, or connecting a new group."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.moment == "batch" and trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.moment == "batch":
            return
        if self.moment == "save" and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.moment == "connect" and trainer.global_rank == 1:
            process_groups._gloo_over = die  # type: ignore[assignment]
        trainer.save_checkpoint("never.ckpt")


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("never reached")


def fit_dying(moment: str, folder: Path) -> None:
    strategy = make_strategy("megatron_ddp", state_dict_type="sharded" if moment == "connect" else "full")
    callbacks = [DiesOnRank1(moment), ModelCheckpoint(folder, save_on_exception=True)]
    make_trainer(strategy, callbacks=callbacks, enable_checkpointing=True).fit(AwkwardModule(), loader())


@pytest.mark.parametrize(
    ("moment", "kind", "said", "within_s"),
    [
        ("save", "NotOnAllRanksError", "rank(s) [1] have ended", 20),
        # Lightning's launcher kills the other ranks when it sees that one has ended, within 5 s
        ("batch", "CollectiveError", "", PATIENCE.total_seconds()),
        # gloo waits for its address until the group's timeout, half an hour
        (
            "connect",
            "CollectiveError",
            "connecting a new group did not complete, since the process of rank 1 is gone",
            20,
        ),
    ],
)
def test_dead_rank_is_not_waited_for(
    ranks: Ranks, tmp_path: Path, moment: str, kind: str, said: str, within_s: float
) -> None:
    """In a step, in a save, and in the save on the exception that follows."""
    survivor, _ = ranks.outcomes(fit_dying, moment, tmp_path)
    assert_failed(survivor, said, kind=kind, within_s=within_s)
    assert moment != "batch" or "the process of rank(s) [1] has ended" in survivor.traceback
    assert not list(tmp_path.glob("*.ckpt"))


def test_killed_rank_is_the_first_failure(tmp_path: Path) -> None:
    """Collectives of both survivors fail because of it, and neither error is the first.

    Rank 0 has the store, so only its report is certain to find it."""
    pool = Ranks(3)
    try:
        survivor, *_ = pool.outcomes(fit_dying, "batch", tmp_path)
    finally:
        pool.close()
    assert_failed(survivor, kind="CollectiveError", within_s=20)
    assert "the first failure among the ranks: the process of rank(s) [1] has ended" in survivor.traceback
