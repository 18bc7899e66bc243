"""An exception where data comes from: in a dataset, on all ranks or on one, in this process or in a worker's.

With data it is rare that all ranks meet the error in the same batch: a broken sample is one rank's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from megastrategy import MegatronDDPStrategy
from tests.support.scripts import run_script

from ..fits import BATCH_SIZE, AwkwardModule, assert_same_tensors, fit, loader, make_strategy, make_trainer
from ..rank_processes import Failure, Ranks, assert_failed

BATCH = 3
PATIENCE_S = 2


def first_sample(rank: int, batch: int = BATCH) -> int:
    """The first sample of a rank's batch, as Lightning shuffles and divides the samples."""
    sampler = DistributedSampler(loader().dataset, 2, rank, shuffle=True, seed=0)  # type: ignore[arg-type]
    return list(sampler)[batch * BATCH_SIZE]


IN_THE_SAME_BATCH = [first_sample(rank) for rank in range(2)]


class BrokenSampleError(Exception):
    """Raised by the tests."""


class Broken(Dataset[Any]):
    """Samples; some cannot be read."""

    def __init__(self, broken: Sequence[int]) -> None:
        self.samples = loader().dataset
        self.broken = broken

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index in self.broken:
            raise BrokenSampleError(f"sample {index}")
        return self.samples[index]  # type: ignore[no-any-return]


def fit_broken(data: Dataset[Any], callbacks: tuple[pl.Callback, ...] = ()) -> None:
    """Fits, and lets the exception out."""
    saving = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = make_trainer(make_strategy("megatron_ddp"), callbacks=list(callbacks), enable_checkpointing=saving)
    trainer.fit(AwkwardModule(), DataLoader(data, batch_size=BATCH_SIZE))


def fit_after_broken(data: Dataset[Any]) -> str:
    """As in a notebook: the exception is read, and the next fit begins. Returns the exception."""
    MegatronDDPStrategy.patience = timedelta(seconds=PATIENCE_S)
    with pytest.raises(BrokenSampleError) as raised:
        fit_broken(data)
    again = fit("megatron_ddp")
    assert_same_tensors(again.weights, fit("ddp").weights)
    return str(raised.value)


# --- one rank alone --------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_sample_that_one_rank_cannot_read_ends_all(ranks: Ranks, rank: int) -> None:
    """The rank that has it says which; the others end with its process, and say who it was if they can know it: what
    ranks tell each other is held by rank 0's process."""
    outcomes = ranks.outcomes(fit_broken, Broken([first_sample(rank)]))
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    failing, waiting = outcomes[rank], outcomes[1 - rank]
    assert (failing.kind, failing.message) == ("BrokenSampleError", f"sample {first_sample(rank)}")
    assert waiting.kind == "CollectiveError"
    assert "another rank ended with an error" in waiting.message
    if rank == 1:
        assert f"the first failure among the ranks: rank 1: BrokenSampleError: {failing.message}" in waiting.traceback
    assert waiting.seconds < 30


def test_a_rank_that_goes_on_alone_is_stopped_before_it_meets_the_others_collectives(ranks: Ranks) -> None:
    """Rank 1 reads its broken sample a batch before rank 0 reads its own. It begins the next fit, while rank 0 waits
    for it in the first. Both would wait for each other, in vain, for the process group's half hour."""
    broken = Broken([first_sample(0, BATCH + 1), first_sample(1, BATCH)])
    waiting, alone = ranks.outcomes(fit_after_broken, broken)
    assert_failed(
        alone,
        "the ranks cannot go on together",
        f"rank(s) [0] have not left it within {PATIENCE_S} s",
        "start all ranks anew",
    )
    assert_failed(waiting, kind="CollectiveError")
    assert "the first failure among the ranks: rank 1: BrokenSampleError" in waiting.traceback
    assert waiting.seconds < 30


# --- all ranks -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_saved_when_all_ranks_had_a_broken_sample_in_the_same_batch(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(fit_saving, Broken(IN_THE_SAME_BATCH), tmp_path / "run")
    [path] = (tmp_path / "run").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == BATCH


def fit_saving(data: Dataset[Any], directory: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=directory, save_on_exception=True, save_top_k=0)
    with pytest.raises(BrokenSampleError):
        fit_broken(data, (checkpoint,))


# --- after the last batch --------------------------------------------------------------------------------------------


# --- in a worker's process -------------------------------------------------------------------------------------------

SCRIPT = """
    import sys

    from torch.utils.data import DataLoader

    from megastrategy import MegatronDDPStrategy
    from tests.doors.fits import BATCH_SIZE, AwkwardModule, make_strategy, make_trainer
    from tests.doors.lightning.test_lightning_data_errors import Broken

    if __name__ == "__main__":
        trainer = make_trainer(make_strategy("megatron_ddp"))
        data = DataLoader(Broken([int(index) for index in sys.argv[1:]]), batch_size=BATCH_SIZE, num_workers=1)
        try:
            trainer.fit(AwkwardModule(), data)
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            print(f"rank {trainer.global_rank} ended with {type(error).__name__}: {error} {notes}")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("broken", [IN_THE_SAME_BATCH, [first_sample(1)]], ids=["all", "one"])
def test_an_error_in_a_dataloaders_worker_ends_all_ranks(tmp_path: Path, broken: list[int]) -> None:
    """The worker's traceback comes with the error."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    output = run_script(script, *broken, cwd=tmp_path).stdout
    assert "rank 1 ended with BrokenSampleError: Caught BrokenSampleError in DataLoader worker process 0" in output
    if len(broken) == 2:
        assert "rank 0 ended with BrokenSampleError" in output
    else:
        assert "rank 0 ended with CollectiveError: rank 0 of 2" in output
        assert "the first failure among the ranks: rank 1: BrokenSampleError: Caught" in output
