"""An exception anywhere, on one rank or on all: nothing hangs, every rank says why, and the next fit works.

The limit of each job is far below the process group's timeout (half an hour), so a rank that waits for it fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from megastrategy import MegatronDDPStrategy
from megastrategy._faults.failure_watch import FailureWatch
from megastrategy._faults.interfaces import add_way_out
from megastrategy._faults.process_collectives import give_up_engine_collectives
from megastrategy._faults.recovery import describe
from megastrategy.core.collectives import process_groups
from megastrategy.core.errors import CollectiveError

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


class RaisesIn(AwkwardModule):
    """Raises in batch 3 on rank 1, in "forward" or in "backward"."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _raise(self, where: str, batch_idx: int) -> None:
        if (where, batch_idx, self.global_rank) == (self.where, BATCH, 1):
            raise OnPurposeError("rank 1")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._raise("forward", batch_idx)
        loss = super().training_step(batch, batch_idx)
        if self.where == "backward":
            loss.register_hook(lambda grad: self._raise("backward", batch_idx))
        return loss


def fit_raising(place: str, sharded: bool, **trainer_options: Any) -> None:
    """Fits, and lets the exception out."""
    strategy = make_strategy("megatron_ddp", use_distributed_optimizer=sharded)
    make_trainer(strategy, **trainer_options).fit(RaisesIn(place), loader())


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


@pytest.mark.parametrize(("place", "sharded"), [("forward", True), ("backward", False)])
def test_exception_on_one_rank_ends_both(ranks: Ranks, place: str, sharded: bool) -> None:
    """As soon as the rank's process ends, as a script's would; each rank says why."""
    waiting, raising = ranks.outcomes(fit_raising, place, sharded)
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
    checkpoint = ModelCheckpoint(dirpath=directory, filename="{step}", save_on_exception=True, save_top_k=0)
    with short_grace(), pytest.raises((OnPurposeError, CollectiveError), match=r"rank [01]"):
        fit_raising("forward", True, callbacks=[checkpoint], enable_checkpointing=True)


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


@pytest.mark.parametrize("place", ["forward", "setup", "on_save_checkpoint"])
def test_next_fit_works_after_an_exception_on_one_rank(ranks: Ranks, tmp_path: Path, place: str) -> None:
    """Rank 1 looks at its exception and goes on; rank 0 gives up waiting for it, says why, and goes on too."""
    first, second = ranks.run(fit_again_after_exception_on_rank_1, place, tmp_path)
    assert second == "rank 1"
    assert first.startswith("rank 0 of 2: ")
    assert first.endswith("was given up: rank 1: OnPurposeError: rank 1")


def fit_again_after_exception_on_rank_1(place: str, directory: Path) -> str:
    module = RaisesIn(place) if place == "forward" else RaisesInHook(place)
    options = {"callbacks": [ModelCheckpoint(dirpath=directory)], "enable_checkpointing": True}
    with short_grace(), pytest.raises((OnPurposeError, RuntimeError)) as raised:
        fit("megatron_ddp", module=module, **options)
    again = fit("megatron_ddp")
    assert_same_tensors(again.weights, fit("ddp").weights)
    return str(raised.value)


class RaisesOnAll(AwkwardModule):
    """Once one rank has begun a collective that the others have not, if it is ``ahead``."""

    def __init__(self, ahead: bool) -> None:
        super().__init__()
        self.ahead = ahead

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH:
            if self.ahead and self.global_rank == 1:
                self.work = torch.distributed.all_reduce(torch.ones(3), async_op=True)
            raise OnPurposeError(f"rank {self.global_rank}")


def test_ranks_at_different_collectives_do_not_go_on(ranks: Ranks) -> None:
    """Backends match collectives by their number: the next ones would be matched with the wrong ones, and hang."""
    outcomes = ranks.outcomes(fit_after_raising_ahead)
    for outcome in outcomes:
        assert_failed(outcome, "the ranks cannot go on together", within_s=30)
    assert "rank 0 left it after " in outcomes[0].message  # whose process holds what ranks tell each other, and ends


def fit_after_raising_ahead() -> None:
    with pytest.raises(OnPurposeError):
        make_trainer(make_strategy("megatron_ddp")).fit(RaisesOnAll(ahead=True), loader())
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
        make_trainer(make_strategy("megatron_ddp")).fit(RaisesOnAll(ahead=False), loader())
    counted = sequence_number() - before
    fit("megatron_ddp")
    return counted


def assert_whole(directory: Path, global_step: int) -> None:
    """The one checkpoint there is of this step, with the state of every parameter."""
    [path] = directory.glob("*.ckpt")
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == global_step
    trainable = [param for param in AwkwardModule().parameters() if param.requires_grad]
    assert len(state["optimizer_states"][0]["state"]) == len(trainable)


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


# --- the text by which other ranks name the failure ------------------------------------------------------------------


def test_text_of_a_failure_begins_with_its_root() -> None:
    """Frameworks of configurations wrap an error that user code has wrapped before."""
    cause, error = ValueError("bad row"), RuntimeError("x" * 5000)
    cause.__cause__, error.__cause__ = KeyError("id"), cause
    described = describe(error)
    assert described.startswith("KeyError: 'id', which led to ValueError: bad row, which led to RuntimeError: xxx")
    assert len(described) < 1000
    group = ExceptionGroup("two of three", [OSError("disk full"), ValueError("late")])
    assert describe(group) == "OSError: disk full, which led to ExceptionGroup: two of three (2 sub-exceptions)"
    fallback = RuntimeError("no sample")
    fallback.__context__ = KeyError("id")
    assert describe(fallback) == "RuntimeError: no sample, raised while handling KeyError: 'id'"


def test_text_of_a_failure_keeps_its_last_line() -> None:
    message = "\n".join(["configuration:", *(f"  key_{number}: {number}" for number in range(500)), "missing: lr"])
    assert describe(ValueError(message)) == "ValueError: missing: lr (configuration:)"


def raised_by_a_worker(error: OSError, cause: Exception) -> OSError:
    """The error that a DataLoader raises for one of its worker's: the tracebacks of both are in its message."""
    try:
        try:
            raise cause
        except Exception as caught:
            raise error from caught
    except OSError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(OSError, match="Caught") as raised:
        wrapper.reraise()
    return raised.value


def test_text_of_a_workers_failure_names_its_root() -> None:
    described = describe(raised_by_a_worker(OSError("loading failed:\nsee above"), ValueError("bad row 29\nof file 3")))
    assert "ValueError: bad row 29\nof file 3, which led to OSError: loading failed:\nsee" in described[:120]
    group = ExceptionGroup("two files", [ValueError("bad row"), KeyError("id")])
    described = describe(raised_by_a_worker(OSError("loading failed"), group))
    assert described.index("ValueError: bad row") < described.index("which led to OSError: loading failed")
    assert "KeyError: 'id'" in described


def test_way_out_is_added_where_hosts_do_not_connect() -> None:
    """Users choose GLOO_SOCKET_IFNAME from the list of this machine's interfaces."""
    error = RuntimeError("Gloo connectFullMesh failed with [...] Connection refused, remote=[127.0.1.1]:1415$1")
    add_way_out(error)
    [note] = error.__notes__
    assert "Set GLOO_SOCKET_IFNAME on every machine" in note
    assert "lo (127.0.0.1)" in note
    other = RuntimeError("The client socket has timed out after 60000ms while trying to connect to (host, 29500)")
    add_way_out(other)
    assert not hasattr(other, "__notes__")
