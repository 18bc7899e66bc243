"""An exception anywhere, on one rank or on all: nothing hangs, every rank says why, and the next fit works.

The limit of each job is far below the process group's timeout (half an hour), so a rank that waits for it fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor

from megastrategy import MegatronDDPStrategy
from megastrategy.core.errors import CollectiveError

from ..failing_fits import (
    BATCH,
    PLACES,
    OnPurposeError,
    assert_whole,
    fit_raising,
    fit_saving_on_exception,
    short_grace,
)
from ..fits import BATCHES_PER_EPOCH, AwkwardModule, assert_same_tensors, fit, loader, make_strategy, make_trainer
from ..rank_processes import Failure, Ranks, assert_failed

# --- one rank alone --------------------------------------------------------------------------------------------------


@pytest.fixture
def left_ranks(ranks: Ranks) -> Iterator[Ranks]:
    """Processes that no other test gets: on one, more collectives may have begun, after which they refuse a fit."""
    yield ranks
    ranks.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_rank_ends_both(ranks: Ranks, place: str, sharded: bool) -> None:
    """As soon as the rank's process ends, as a script's would; each rank says why."""
    waiting, raising = ranks.outcomes(fit_raising, place, 1, sharded)
    assert isinstance(raising, Failure)
    assert (raising.kind, raising.message) == ("OnPurposeError", "rank 1")
    assert_failed(waiting, "rank 0 of 2: ", "another rank ended with an error", kind="CollectiveError")
    assert "the first failure among the ranks: rank 1: OnPurposeError: rank 1" in waiting.traceback
    assert waiting.seconds < 30


def test_a_checkpoint_on_exception_is_whole_when_one_rank_alone_raises(left_ranks: Ranks, tmp_path: Path) -> None:
    """The others give up waiting for it, and the shards of all ranks are those of the same step."""
    left_ranks.run(fit_saving_alone, tmp_path / "run")
    assert_whole(tmp_path / "run", BATCH)


def fit_saving_alone(directory: Path) -> None:
    with short_grace():
        fit_saving_on_exception("forward", 1, True, directory)


class RaisesInValidation(AwkwardModule):
    """On rank 1, in the second batch after the first epoch's training."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx == 1 and not self.trainer.sanity_checking:
            raise OnPurposeError("rank 1")


def test_a_checkpoint_on_exception_in_validation_is_whole_when_one_rank_alone_raises(
    left_ranks: Ranks, tmp_path: Path
) -> None:
    """ModelCheckpoint first asks for all metrics, and the ranks have different ones left to reduce."""
    first, second = left_ranks.run(fit_saving_in_validation, tmp_path / "run")
    assert second == "rank 1"
    assert first.endswith("was given up: rank 1: OnPurposeError: rank 1")
    assert_whole(tmp_path / "run", BATCHES_PER_EPOCH)


def fit_saving_in_validation(directory: Path) -> str:
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, save_top_k=0)
    with short_grace(), pytest.raises((OnPurposeError, CollectiveError)) as raised:
        fit("megatron_ddp", module=RaisesInValidation(), callbacks=[checkpoint], enable_checkpointing=True)
    return str(raised.value)


class RaisesInTheFinder(AwkwardModule):
    """Which cleans up behind an exception, in collectives of its own."""

    lr = 1e-3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == BATCH:
            raise OnPurposeError("rank 1")
        return super().training_step(batch, batch_idx)


def test_the_cause_is_told_where_a_rank_cleans_up_behind_it(left_ranks: Ranks, tmp_path: Path) -> None:
    first, _ = left_ranks.run(fit_finding_a_rate, tmp_path)
    assert first.endswith("was given up: rank 1: OnPurposeError: rank 1")


def fit_finding_a_rate(directory: Path) -> str:
    with short_grace(), pytest.raises((OnPurposeError, CollectiveError)) as raised:
        fit("megatron_ddp", module=RaisesInTheFinder(), callbacks=[LearningRateFinder()], default_root_dir=directory)
    return str(raised.value)


class RaisesInEverySave(AwkwardModule):
    """On rank 1: in the one that ModelCheckpoint makes on the exception, too."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_rank == 1:
            raise OnPurposeError("in the save")


@pytest.mark.sample(1)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_rank_that_fails_again_in_the_save_on_exception_keeps_nobody_waiting(
    ranks: Ranks, tmp_path: Path, sharded: bool
) -> None:
    first, second = ranks.outcomes(fit_failing_in_every_save, tmp_path, sharded)
    assert (second.kind, second.message) == ("OnPurposeError", "in the save")
    assert first.kind != "died"


def fit_failing_in_every_save(directory: Path, sharded: bool) -> None:
    MegatronDDPStrategy.patience = timedelta(seconds=2)  # this process ends with the exception
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, every_n_train_steps=2)
    options: dict[str, Any] = {"callbacks": [checkpoint], "enable_checkpointing": True}
    mode = {"use_distributed_optimizer": sharded}
    with short_grace():
        fit("megatron_ddp", strategy_options=mode, module=RaisesInEverySave(), **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", PLACES)
def test_the_next_fit_works_after_an_exception_on_one_rank_alone(ranks: Ranks, place: str) -> None:
    """Rank 1 looks at its exception and goes on; rank 0 gives up waiting for it, says why, and goes on too."""
    first, second = ranks.run(fit_again_after_exception_on_rank_1, place)
    assert second == "rank 1"
    assert first.startswith("rank 0 of 2: ")
    assert first.endswith("was given up: rank 1: OnPurposeError: rank 1")


def fit_again_after_exception_on_rank_1(place: str) -> str:
    with short_grace(), pytest.raises((OnPurposeError, RuntimeError)) as raised:
        fit_raising(place, 1, True)
    again = fit("megatron_ddp")
    assert_same_tensors(again.weights, fit("ddp").weights)
    return str(raised.value)


class RaisesOutsideBatches(AwkwardModule):
    """In the hook called ``where``, on rank 1."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        for name in HOOKS:
            setattr(self, name, functools.partial(self._maybe_raise, name, getattr(self, name)))

    def _maybe_raise(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == self.where and self.trainer.global_rank == 1:
            raise OnPurposeError(name)
        return hook(*args, **kwargs)


HOOKS = [
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "validation_step",
    "on_train_epoch_end",
    "on_save_checkpoint",
]
"""After each of them Lightning has a collective of its own, or makes its first ones."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_outside_of_batches_is_noticed_by_all_and_the_next_fit_works(
    ranks: Ranks, tmp_path: Path, hook: str
) -> None:
    """Rank 1's script catches it, so that nothing of the process ends that the other one waits for."""
    first, second = ranks.run(fit_again_after_exception_in_hook, hook, tmp_path)
    assert second == hook
    assert first.endswith(f"was given up: rank 1: OnPurposeError: {hook}")


def fit_again_after_exception_in_hook(hook: str, directory: Path) -> str:
    with short_grace(), pytest.raises((OnPurposeError, CollectiveError)) as raised:
        fit(
            "megatron_ddp",
            module=RaisesOutsideBatches(hook),
            callbacks=[ModelCheckpoint(dirpath=directory)],
            enable_checkpointing=True,
            num_sanity_val_steps=1,
        )
    again = fit("megatron_ddp")
    assert_same_tensors(again.weights, fit("ddp").weights)
    return str(raised.value)


# --- all ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_the_next_fit_in_the_process_works(ranks: Ranks, place: str, sharded: bool) -> None:
    """In a notebook one corrects the error and goes on."""
    assert ranks.run(fit_again_after_exception, place, sharded) == ["rank 0", "rank 1"]


def fit_again_after_exception(place: str, sharded: bool) -> str:
    with pytest.raises(OnPurposeError) as raised:
        fit_raising(place, None, sharded)
    again = fit("megatron_ddp", strategy_options={"use_distributed_optimizer": sharded})
    assert_same_tensors(again.weights, fit("ddp").weights)
    return str(raised.value)


class RaisesAhead(pl.Callback):
    """On all ranks; one has begun a collective that the others have not."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH:
            if trainer.global_rank == 1:
                self.work = torch.distributed.all_reduce(torch.ones(3), async_op=True)
            raise OnPurposeError(f"rank {trainer.global_rank}")


def test_ranks_that_left_at_different_collectives_do_not_begin_another_fit(ranks: Ranks) -> None:
    """Backends match collectives by their number: the next ones would be matched with the wrong ones, and hang."""
    outcomes = ranks.outcomes(fit_after_raising_ahead)
    for outcome in outcomes:
        assert_failed(outcome, "the ranks cannot go on together", within_s=30)
    assert "rank 0 left it after " in outcomes[0].message  # whose process holds what ranks tell each other, and ends


def fit_after_raising_ahead() -> None:
    with pytest.raises(OnPurposeError):
        make_trainer(make_strategy("megatron_ddp"), callbacks=[RaisesAhead()]).fit(AwkwardModule(), loader())
    fit("megatron_ddp")


# --- saving on the way out -------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("place", ["forward", "backward", "on_before_optimizer_step"])
def test_a_checkpoint_on_exception_is_whole(ranks: Ranks, tmp_path: Path, place: str, sharded: bool) -> None:
    """The optimizer's shards are gathered by a group made for it, since the old one may be in any state."""
    directory = tmp_path / "run"
    for outcome in ranks.run(fit_saving_on_exception, place, None, sharded, directory):
        assert outcome == "raised"
    [path] = directory.glob("*.ckpt")
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == BATCH
    trainable = [param for param in AwkwardModule().parameters() if param.requires_grad]
    assert len(state["optimizer_states"][0]["state"]) == len(trainable)
