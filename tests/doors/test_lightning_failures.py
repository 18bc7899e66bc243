"""An exception anywhere, on one rank or on all: nothing hangs, every rank says why, and the next fit works.

The limit of each job is far below the process group's timeout (half an hour), so a rank that waits for it fails.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from megastrategy import MegatronDDPStrategy
from megastrategy._faults.deadlocks import WaitsInVain
from megastrategy.core.errors import CollectiveError

from .features.manual import Manual, manual
from .fits import (
    BATCHES_PER_EPOCH,
    AwkwardModule,
    assert_same_fit,
    assert_same_tensors,
    fit,
    loader,
    make_strategy,
    make_trainer,
)
from .rank_processes import Failure, Ranks

BATCH = 3
"""The batch in which things happen: two after the first, so that states exist, and some before the epoch's end."""


class OnPurposeError(Exception):
    """What the tests raise."""


# --- where -----------------------------------------------------------------------------------------------------------


def raise_on(module: pl.LightningModule, rank: int | None, batch_idx: int) -> None:
    if batch_idx == BATCH and rank in (None, module.trainer.global_rank):
        raise OnPurposeError(f"rank {module.trainer.global_rank}")


class RaisesIn(AwkwardModule):
    """Raises in batch 3, in the place called ``where``, on one rank or on all (None)."""

    def __init__(self, where: str, rank: int | None) -> None:
        super().__init__()
        self.where, self.rank = where, rank

    def _raise(self, where: str, batch_idx: int) -> None:
        if where == self.where:
            raise_on(self, self.rank, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._raise("forward", batch_idx)
        loss = super().training_step(batch, batch_idx)
        if self.where == "backward":
            loss.register_hook(lambda grad: self._raise("backward", batch_idx))
        return loss

    def on_after_backward(self) -> None:
        self._raise("on_after_backward", self.trainer.fit_loop.batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._raise("on_before_optimizer_step", self.trainer.fit_loop.batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        module = self

        class Raising(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                if module.trainer.training:  # not in the trial step of the probe
                    module._raise("step", module.trainer.fit_loop.batch_idx)
                return super().step(closure)

        return Raising(self.parameters(), lr=1e-2)


class RaisesInCallback(pl.Callback):
    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        raise_on(pl_module, self.rank, batch_idx)


PLACES = ["forward", "backward", "on_after_backward", "on_before_optimizer_step", "step", "callback"]


def fit_raising(place: str, rank: int | None, sharded: bool, callbacks: tuple[pl.Callback, ...] = ()) -> pl.Trainer:
    """Fits, and lets the exception out."""
    if place == "callback":
        callbacks = (*callbacks, RaisesInCallback(rank))
    strategy = make_strategy("megatron_ddp", use_distributed_optimizer=sharded)
    saving = bool([callback for callback in callbacks if isinstance(callback, ModelCheckpoint)])
    trainer = make_trainer(strategy, callbacks=list(callbacks), enable_checkpointing=saving)
    trainer.fit(RaisesIn(place, rank), loader())
    return trainer


# --- one rank alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_rank_ends_both(ranks: Ranks, place: str, sharded: bool) -> None:
    """As soon as the rank's process ends, as a script's would; each rank says why."""
    waiting, raising = ranks.outcomes(fit_raising, place, 1, sharded)
    assert isinstance(raising, Failure)
    assert (raising.kind, raising.message) == ("OnPurposeError", "rank 1")
    assert isinstance(waiting, Failure)
    assert waiting.kind == "CollectiveError"
    assert "rank 0 of 2: " in waiting.message
    assert "another rank ended with an error" in waiting.message
    assert "the first failure among the ranks: rank 1: OnPurposeError: rank 1" in waiting.traceback
    assert waiting.seconds < 30


def assert_whole(directory: Path, global_step: int) -> None:
    """The one checkpoint there is of this step, with the state of every parameter."""
    [path] = directory.glob("*.ckpt")
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == global_step
    trainable = [param for param in AwkwardModule().parameters() if param.requires_grad]
    assert len(state["optimizer_states"][0]["state"]) == len(trainable)


def test_a_checkpoint_on_exception_is_whole_when_one_rank_alone_raises(ranks: Ranks, tmp_path: Path) -> None:
    """The others give up waiting for it, and the shards of all ranks are those of the same step."""
    ranks.run(fit_saving_alone, tmp_path / "run")
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
    ranks: Ranks, tmp_path: Path
) -> None:
    """ModelCheckpoint first asks for all metrics, of which the ranks have different ones left to reduce."""
    first, second = ranks.run(fit_saving_in_validation, tmp_path / "run")
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


def test_the_cause_is_told_where_a_rank_cleans_up_behind_it(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks.run(fit_finding_a_rate, tmp_path)
    assert first.endswith("was given up: rank 1: OnPurposeError: rank 1")


def fit_finding_a_rate(directory: Path) -> str:
    with short_grace(), pytest.raises((OnPurposeError, CollectiveError)) as raised:
        fit("megatron_ddp", module=RaisesInTheFinder(), callbacks=[LearningRateFinder()], default_root_dir=directory)
    return str(raised.value)


def test_with_all_reduce_rank_0_saves_though_nobody_else_comes(ranks: Ranks, tmp_path: Path) -> None:
    """It has everything; the others are still waiting when its patience ends."""
    ranks.outcomes(fit_saving_impatiently, tmp_path / "run")
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


def fit_saving_impatiently(directory: Path) -> None:
    MegatronDDPStrategy.patience = timedelta(seconds=1)  # this process ends with the exception
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, save_top_k=0)
    fit_raising("forward", 0, False, (checkpoint,))


class RaisesInEverySave(AwkwardModule):
    """On rank 1: in the one that ModelCheckpoint makes on the exception, too."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_rank == 1:
            raise OnPurposeError("in the save")


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


@contextlib.contextmanager
def short_grace() -> Iterator[None]:
    """These processes go on to other tests."""
    before, WaitsInVain.GRACE_S = WaitsInVain.GRACE_S, 0.5
    try:
        yield
    finally:
        WaitsInVain.GRACE_S = before


@pytest.mark.sample(2)
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


@pytest.mark.sample(3)
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


def test_an_exception_in_validation_alone_is_noticed_by_all(ranks: Ranks) -> None:
    first, second = ranks.run(validate_again_after_exception)
    assert second == "validation_step"
    assert first.endswith("was given up: rank 1: OnPurposeError: validation_step")


def validate_again_after_exception() -> str:
    with short_grace(), pytest.raises((OnPurposeError, CollectiveError)) as raised:
        make_trainer(make_strategy("megatron_ddp")).validate(RaisesOutsideBatches("validation_step"), loader())
    module = AwkwardModule()
    ours, ddp = (
        make_trainer(make_strategy(name)).validate(module, loader(), verbose=False) for name in ("megatron_ddp", "ddp")
    )
    assert ours == ddp
    return str(raised.value)


# --- all ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
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
    """On all ranks, of which one has begun a collective that the others have not."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH:
            if trainer.global_rank == 1:
                self.work = torch.distributed.all_reduce(torch.ones(3), async_op=True)
            raise OnPurposeError(f"rank {trainer.global_rank}")


def test_ranks_that_left_at_different_collectives_do_not_begin_another_fit(ranks: Ranks) -> None:
    """Backends match collectives by their number: the next ones would be matched with the wrong ones, and hang."""
    outcomes = ranks.outcomes(fit_after_raising_ahead)
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert "the ranks cannot go on together" in outcome.message
        assert outcome.seconds < 30
    assert "rank 0 left it after " in outcomes[0].message  # whose process holds what ranks tell each other, and ends


def fit_after_raising_ahead() -> None:
    with pytest.raises(OnPurposeError):
        make_trainer(make_strategy("megatron_ddp"), callbacks=[RaisesAhead()]).fit(AwkwardModule(), loader())
    fit("megatron_ddp")


# --- a rank that leaves a batch out ----------------------------------------------------------------------------------


class LeavesOut(Manual):
    """``training_step`` returns None before the backward in batch 3, on one rank alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        if batch_idx == BATCH and self.trainer.global_rank == self.rank:
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def fit_leaving_out(rank: int, sharded: bool) -> str:
    with pytest.raises(CollectiveError) as raised:
        fit("megatron_ddp", module=LeavesOut(rank), strategy_options={"use_distributed_optimizer": sharded})
    again = fit("megatron_ddp", strategy_options={"use_distributed_optimizer": sharded})
    assert_same_tensors(again.weights, fit("ddp").weights)
    return str(raised.value)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_left_out_by_one_rank_is_noticed_by_all(ranks: Ranks, rank: int, sharded: bool) -> None:
    """It waits before the next batch, the other one for its gradients; so they do under "ddp", for half an hour."""
    for message in ranks.run(fit_leaving_out, rank, sharded):
        assert "the ranks wait for each other: rank 0 waits " in message
        assert f"rank {rank} waits for all ranks, before the next batch or " in message
        assert f"rank {1 - rank} waits for gradients or weights" in message
        assert "loss * 0.0" in message


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
def test_a_collective_for_one_rank_only_is_noticed_by_all(ranks: Ranks, what: str, said: list[str]) -> None:
    """Under "ddp" it is taken for whichever comes next on the other rank: that ends the processes, or both wait."""
    for expected, message in zip(said, ranks.run(fit_for_rank_zero_only, what), strict=True):
        assert expected in message
        assert "sync_dist=True" in message


def fit_for_rank_zero_only(what: str) -> str:
    with pytest.raises(CollectiveError) as raised:
        fit("megatron_ddp", module=ForRankZeroOnly(what))
    assert_same_tensors(fit("megatron_ddp").weights, fit("ddp").weights)
    return str(raised.value)


class NothingToLearnOnRank1(Manual):
    """One rank has a batch without anything to learn from.

    To return early there leaves the other rank alone in its backward, and in Lightning 2.6 both wait, under "ddp" too:
    one in the backward, one in what Lightning broadcasts before the next batch.
    """

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        loss = self.loss(batch)
        if batch_idx == BATCH and self.global_rank == 1:
            loss = loss * 0.0
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("sharded", [True, False])
def test_a_rank_with_nothing_to_learn_takes_part_with_a_loss_of_zero(ranks: Ranks, sharded: bool) -> None:
    ddp = ranks.run(manual, "ddp", {}, NothingToLearnOnRank1)
    ours = ranks.run(manual, "megatron_ddp", {"use_distributed_optimizer": sharded}, NothingToLearnOnRank1)
    for actual, expected in zip(ours, ddp, strict=True):
        assert_same_fit(actual, expected)


# --- saving on the way out -------------------------------------------------------------------------------------------


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


class SavesUnderOneName(pl.Callback):
    """Saves itself, under a name that rank 0 chooses, as tools do that put the time into it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.chosen: list[str] = []

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        name = trainer.strategy.broadcast(f"of-rank-{trainer.global_rank}")
        stopped_by = trainer.strategy.broadcast(str(exception), src=1)
        self.chosen = [name, stopped_by]
        trainer.save_checkpoint(self.directory / f"{name}.ckpt")


def test_what_one_rank_chooses_after_an_exception_reaches_the_others(ranks: Ranks, tmp_path: Path) -> None:
    for chosen in ranks.run(choose_after_exception, tmp_path):
        assert chosen == ["of-rank-0", "rank 1"]
    assert [path.name for path in tmp_path.iterdir()] == ["of-rank-0.ckpt"]


def choose_after_exception(directory: Path) -> list[str]:
    saves = SavesUnderOneName(directory)
    with pytest.raises(OnPurposeError):
        fit_raising("forward", None, True, (saves,))
    return saves.chosen


class GathersOnRank1(pl.Callback):
    """On one rank alone, as code under ``if trainer.is_global_zero`` does."""

    gathered: list[float] | None = None

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        if trainer.global_rank == 1:
            self.gathered = pl_module.all_gather(torch.tensor(1.0)).tolist()


def test_a_gather_after_an_exception_does_not_wait_for_a_rank_that_left(ranks: Ranks) -> None:
    """``(1,)``: the other rank was not there. The default group would wait until its timeout."""
    assert ranks.run(gather_after_exception) == [None, [1.0]]


def gather_after_exception() -> list[float] | None:
    gathers = GathersOnRank1()
    with pytest.raises(OnPurposeError):
        fit_raising("forward", None, True, (gathers,))
    return gathers.gathered


def fit_saving_on_exception(place: str, rank: int | None, sharded: bool, directory: Path) -> str:
    checkpoint = ModelCheckpoint(dirpath=directory, filename="{step}", save_on_exception=True, save_top_k=0)
    with pytest.raises(Exception, match=r"rank [01]"):
        fit_raising(place, rank, sharded, (checkpoint,))
    return "raised"


# --- signals ---------------------------------------------------------------------------------------------------------


class Signals(pl.Callback):
    """A signal reaches the process in batch 3, on one rank or on all (None)."""

    def __init__(self, number: signal.Signals, rank: int | None = None) -> None:
        self.number, self.rank = number, rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH and self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), self.number)


def fit_with(callback: pl.Callback, directory: Path, strategy: str = "megatron_ddp", **options: Any) -> None:
    WaitsInVain.GRACE_S = 0.5  # this process ends with the exception
    log = logging.FileHandler(directory.with_name(f"rank{os.environ['LOCAL_RANK']}.log"))
    logging.getLogger("megastrategy").addHandler(log)
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, save_top_k=0)
    trainer = make_trainer(
        make_strategy(strategy), callbacks=[callback, checkpoint], enable_checkpointing=True, **options
    )
    trainer.fit(AwkwardModule(), loader())


@pytest.mark.parametrize("strategy", ["ddp", "megatron_ddp"])
def test_ctrl_c_ends_one_rank_and_saves(one_rank: Ranks, tmp_path: Path, strategy: str) -> None:
    [outcome] = one_rank.outcomes(fit_with, Signals(signal.SIGINT), tmp_path / "run", strategy, devices=1)
    assert outcome.kind == "SystemExit"
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


def test_ctrl_c_ends_all_ranks_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    """It reaches all processes of a terminal's foreground group."""
    outcomes = ranks.outcomes(fit_with, Signals(signal.SIGINT), tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["SystemExit", "SystemExit"]
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_of_one_rank_alone_ends_all_and_saves(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    """``kill -INT`` of one process: the others, which wait for it in a collective, come and save with it."""
    outcomes = ranks.outcomes(fit_with, Signals(signal.SIGINT, rank), tmp_path / "run")
    assert outcomes[rank].kind == "SystemExit"
    assert outcomes[1 - rank].kind == "CollectiveError"
    assert f"was given up: rank {rank}: KeyboardInterrupt" in outcomes[1 - rank].message
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_sigterm_ends_all_ranks_after_the_batch_and_saves(ranks: Ranks, tmp_path: Path, rank: int | None) -> None:
    """SLURM sends it to every task when the time is up; where it reaches one rank alone, all stop, too."""
    for outcome in ranks.outcomes(fit_with, Signals(signal.SIGTERM, rank), tmp_path / "run"):
        assert isinstance(outcome, Failure)
        assert outcome.kind == SIGTERMException.__name__
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH + 1


class SignalsAtAnyPoint(pl.Callback):
    """SIGTERM at a time of its own on each rank, wherever that is."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == BATCH:
            delay_s = 0.05 if trainer.global_rank == 0 else 0.1
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()


def test_sigterm_that_finds_ranks_at_different_points_ends_all_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    """Under "ddp" Lightning's handler, a collective of its own, hangs or fails here in most runs."""
    for outcome in ranks.outcomes(fit_with, SignalsAtAnyPoint(), tmp_path / "run", max_epochs=10_000):
        assert isinstance(outcome, Failure)
        assert outcome.kind == SIGTERMException.__name__
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] > BATCH


def test_a_fit_leaves_lightnings_handling_of_sigterm_as_it_was(ranks: Ranks) -> None:
    ranks.run(check_sigterm_handling)


def check_sigterm_handling() -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(make_strategy("megatron_ddp"), max_epochs=1)
    trainer.fit(AwkwardModule(), loader())
    assert signal.getsignal(signal.SIGTERM) is before
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)
    assert "_slurm_sigusr_handler_fn" not in vars(trainer._signal_connector)
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
