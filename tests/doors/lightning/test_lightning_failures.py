"""An exception anywhere, on one rank or on all: nothing hangs, every rank says why, and the next fit works.

The limit of each job is far below the process group's timeout (half an hour), so a rank that waits for it fails.
"""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from megastrategy import MegatronDDPStrategy
from megastrategy._faults.failure_watch import FailureWatch
from megastrategy._faults.process_collectives import give_up_engine_collectives
from megastrategy.core.collectives import process_groups
from megastrategy.core.errors import CollectiveError
from tests.support.scripts import run_script

from ..fits import (
    BATCH_SIZE,
    BATCHES_PER_EPOCH,
    AwkwardModule,
    assert_same_tensors,
    fit,
    loader,
    make_strategy,
    make_trainer,
)
from ..rank_processes import Failure, Ranks, assert_failed

BATCH = 3
"""The batch in which things happen: two after the first, so that states exist, and some before the epoch's end."""


class OnPurposeError(Exception):
    """Raised by the tests."""


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


@contextlib.contextmanager
def short_grace() -> Iterator[None]:
    """These processes go on to other tests."""
    before, FailureWatch.GRACE_S = FailureWatch.GRACE_S, 0.5
    try:
        yield
    finally:
        FailureWatch.GRACE_S = before


@pytest.fixture
def left_ranks(ranks: Ranks) -> Iterator[Ranks]:
    """Processes that no other test gets: on one, more collectives may have begun, after which they refuse a fit."""
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("place", "sharded"), [("forward", True), ("backward", False), ("on_before_optimizer_step", True)]
)
def test_exception_on_one_rank_ends_both(ranks: Ranks, place: str, sharded: bool) -> None:
    """As soon as the rank's process ends, as a script's would; each rank says why."""
    waiting, raising = ranks.outcomes(fit_raising, place, 1, sharded)
    assert isinstance(raising, Failure)
    assert (raising.kind, raising.message) == ("OnPurposeError", "rank 1")
    assert_failed(waiting, "rank 0 of 2: ", "another rank ended with an error", kind="CollectiveError")
    assert "the first failure among the ranks: rank 1: OnPurposeError: rank 1" in waiting.traceback
    assert waiting.seconds < 30


def test_checkpoint_on_exception_of_one_rank_is_whole(left_ranks: Ranks, tmp_path: Path) -> None:
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


def test_checkpoint_on_a_failed_validation_is_whole(left_ranks: Ranks, tmp_path: Path) -> None:
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


def test_cause_is_told_where_a_rank_cleans_up(left_ranks: Ranks, tmp_path: Path) -> None:
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


def test_failure_in_the_last_save_keeps_nobody_waiting(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.outcomes(fit_failing_in_every_save, tmp_path)
    assert (second.kind, second.message) == ("OnPurposeError", "in the save")
    assert first.kind != "died"


def fit_failing_in_every_save(directory: Path) -> None:
    MegatronDDPStrategy.patience = timedelta(seconds=2)  # this process ends with the exception
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, every_n_train_steps=2)
    options: dict[str, Any] = {"callbacks": [checkpoint], "enable_checkpointing": True}
    with short_grace():
        fit("megatron_ddp", module=RaisesInEverySave(), **options)


class RaisesInHook(AwkwardModule):
    """In the hook called ``where``, on rank 1. After each of them Lightning has a collective, or makes its first."""

    def __init__(self, where: str) -> None:
        super().__init__()
        hook = getattr(self, where)

        def raise_on_rank_1(*args: Any, **kwargs: Any) -> Any:
            if self.trainer.global_rank == 1:
                raise OnPurposeError("rank 1")
            return hook(*args, **kwargs)

        setattr(self, where, raise_on_rank_1)


@pytest.mark.parametrize(
    "place",
    [
        "forward",
        "setup",
        "on_save_checkpoint",
        pytest.param("on_before_optimizer_step", marks=pytest.mark.nightly),
        pytest.param("configure_optimizers", marks=pytest.mark.nightly),
    ],
)
def test_next_fit_works_after_an_exception_on_one_rank(ranks: Ranks, tmp_path: Path, place: str) -> None:
    """Rank 1 looks at its exception and goes on; rank 0 gives up waiting for it, says why, and goes on too."""
    first, second = ranks.run(fit_again_after_exception_on_rank_1, place, tmp_path)
    assert second == "rank 1"
    assert first.startswith("rank 0 of 2: ")
    assert first.endswith("was given up: rank 1: OnPurposeError: rank 1")


def fit_again_after_exception_on_rank_1(place: str, directory: Path) -> str:
    module = RaisesIn(place, 1) if place in PLACES else RaisesInHook(place)
    options = {"callbacks": [ModelCheckpoint(dirpath=directory)], "enable_checkpointing": True}
    with short_grace(), pytest.raises((OnPurposeError, RuntimeError)) as raised:
        fit("megatron_ddp", module=module, **options)
    again = fit("megatron_ddp")
    assert_same_tensors(again.weights, fit("ddp").weights)
    return str(raised.value)


@pytest.mark.parametrize(("place", "sharded"), [("forward", True), ("backward", False)])
def test_next_fit_works_after_an_exception_on_all(ranks: Ranks, place: str, sharded: bool) -> None:
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


def test_ranks_at_different_collectives_do_not_go_on(ranks: Ranks) -> None:
    """Backends match collectives by their number: the next ones would be matched with the wrong ones, and hang."""
    outcomes = ranks.outcomes(fit_after_raising_ahead)
    for outcome in outcomes:
        assert_failed(outcome, "the ranks cannot go on together", within_s=30)
    assert "rank 0 left it after " in outcomes[0].message  # whose process holds what ranks tell each other, and ends


def fit_after_raising_ahead() -> None:
    with pytest.raises(OnPurposeError):
        make_trainer(make_strategy("megatron_ddp"), callbacks=[RaisesAhead()]).fit(AwkwardModule(), loader())
    fit("megatron_ddp")


@contextlib.contextmanager
def slow_connections() -> Iterator[None]:
    """Rank 0 connects a group once it has asked whether rank 1 still runs, and rank 1, which does not ask, after it."""
    world = process_groups.world_group()
    store = torch.distributed.distributed_c10d._get_default_store()
    connect = process_groups._gloo_over

    def connect_late(*arguments: Any) -> torch.distributed.ProcessGroup:
        asked = f"rank 0 has asked, {arguments[3]}"
        if world.rank() == 0:
            before = sequence_number()
            while sequence_number() == before:
                time.sleep(0.01)
            store.set(asked, "")
        else:
            store.clone().wait([asked])  # type: ignore[attr-defined]  # missing in torch's stubs
        return connect(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "_CHECK_PEERS_S", 0.05 if world.rank() == 0 else 60.0)
        patch.setattr(process_groups, "_gloo_over", connect_late)
        yield


def sequence_number() -> int:
    """Gloo's count of the default group's collectives and messages on this rank."""
    return process_groups.world_group()._get_sequence_number_for_group()  # type: ignore[attr-defined,no-any-return]


def test_next_fit_works_though_a_group_connected_slowly(ranks: Ranks) -> None:
    """The rank that waited longer has sent messages to the other's process. Gloo counts them with the collectives."""
    first, second = ranks.run(fit_after_slow_connections)
    assert first > second


def fit_after_slow_connections() -> int:
    fit("megatron_ddp")  # which makes the default group, if no test before has
    give_up_engine_collectives()  # so that the next makes new groups
    before = sequence_number()
    with slow_connections(), pytest.raises(OnPurposeError):
        fit_raising("forward", None, True)
    counted = sequence_number() - before
    fit("megatron_ddp")
    return counted


def fit_saving_on_exception(place: str, rank: int | None, sharded: bool, directory: Path) -> str:
    checkpoint = ModelCheckpoint(dirpath=directory, filename="{step}", save_on_exception=True, save_top_k=0)
    with pytest.raises(Exception, match=r"rank [01]"):
        fit_raising(place, rank, sharded, (checkpoint,))
    return "raised"


def assert_whole(directory: Path, global_step: int) -> None:
    """The one checkpoint there is of this step, with the state of every parameter."""
    [path] = directory.glob("*.ckpt")
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == global_step
    trainable = [param for param in AwkwardModule().parameters() if param.requires_grad]
    assert len(state["optimizer_states"][0]["state"]) == len(trainable)


@pytest.mark.parametrize(("place", "sharded"), [("backward", True), ("forward", False)])
def test_checkpoint_on_exception_is_whole(ranks: Ranks, tmp_path: Path, place: str, sharded: bool) -> None:
    """The optimizer's shards are gathered by a group made for it, since the old one may be in any state."""
    assert ranks.run(fit_saving_on_exception, place, None, sharded, tmp_path / "run") == ["raised"] * 2
    assert_whole(tmp_path / "run", BATCH)


# --- where data comes from -------------------------------------------------------------------------------------------


def first_sample(rank: int, batch: int = BATCH) -> int:
    """The first sample of a rank's batch, as Lightning shuffles and divides the samples."""
    sampler = DistributedSampler(loader().dataset, 2, rank, shuffle=True, seed=0)  # type: ignore[arg-type]
    return list(sampler)[batch * BATCH_SIZE]


class Broken(Dataset[Any]):
    """Samples; some cannot be read."""

    def __init__(self, broken: Sequence[int]) -> None:
        self.samples = loader().dataset
        self.broken = broken

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index in self.broken:
            raise OnPurposeError(f"sample {index}")
        return self.samples[index]  # type: ignore[no-any-return]


def fit_after_broken(data: Dataset[Any]) -> str:
    """As in a notebook: the exception is read, and the next fit begins. Returns the exception."""
    MegatronDDPStrategy.patience = timedelta(seconds=2)
    with pytest.raises(OnPurposeError) as raised:
        make_trainer(make_strategy("megatron_ddp")).fit(AwkwardModule(), DataLoader(data, batch_size=BATCH_SIZE))
    again = fit("megatron_ddp")
    assert_same_tensors(again.weights, fit("ddp").weights)
    return str(raised.value)


def test_rank_that_goes_on_alone_is_stopped(ranks: Ranks) -> None:
    """Rank 1 reads its broken sample a batch before rank 0 reads its own. It begins the next fit, while rank 0 waits
    for it in the first. Both would wait for each other, in vain, for the process group's half hour."""
    broken = Broken([first_sample(0, BATCH + 1), first_sample(1, BATCH)])
    waiting, alone = ranks.outcomes(fit_after_broken, broken)
    assert_failed(
        alone,
        "the ranks cannot go on together",
        "rank(s) [0] have not left it within 2 s",
        "start all ranks anew",
    )
    assert_failed(waiting, kind="CollectiveError", within_s=30)
    assert "the first failure among the ranks: rank 1: OnPurposeError" in waiting.traceback


SCRIPT = """
    import sys

    from torch.utils.data import DataLoader

    from tests.doors.fits import BATCH_SIZE, AwkwardModule, make_strategy, make_trainer
    from tests.doors.lightning.test_lightning_failures import Broken

    if __name__ == "__main__":
        trainer = make_trainer(make_strategy("megatron_ddp"))
        data = DataLoader(Broken([int(sys.argv[1])]), batch_size=BATCH_SIZE, num_workers=1)
        try:
            trainer.fit(AwkwardModule(), data)
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            print(f"rank {trainer.global_rank} ended with {type(error).__name__}: {error} {notes}")
"""


def test_error_in_a_loaders_worker_ends_all_ranks(tmp_path: Path) -> None:
    """The worker's traceback comes with the error."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    output = run_script(script, first_sample(1), cwd=tmp_path).stdout
    assert "rank 1 ended with OnPurposeError: Caught OnPurposeError in DataLoader worker process 0" in output
    assert "rank 0 ended with CollectiveError: rank 0 of 2" in output
    assert "the first failure among the ranks: rank 1: " in output
    assert f"OnPurposeError: sample {first_sample(1)} (Caught OnPurposeError in DataLoader worker process 0.)" in output
