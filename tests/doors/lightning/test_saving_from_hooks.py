"""``trainer.save_checkpoint`` wherever a user calls it: nothing hangs, and the file is the one of "ddp"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from ..fits import fit
from ..rank_processes import Ranks
from .test_lightning_checkpoints import assert_same_value, load

HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
]


class SavesIn(pl.Callback):
    """Saves in one hook, each time it comes; gradients are accumulated over three batches meanwhile."""

    def __init__(self, hook: str, folder: Path) -> None:
        def save(trainer: pl.Trainer, *_: Any) -> None:
            if not trainer.sanity_checking:
                trainer.save_checkpoint(folder / f"{self.count:03}.ckpt")
                self.count += 1

        self.count = 0
        setattr(self, hook, save)


def fit_saving_in(name: str, hook: str, folder: Path, options: dict[str, Any]) -> int:
    saves = SavesIn(hook, folder)
    fit(name, callbacks=[saves], accumulate_grad_batches=3, max_epochs=1, strategy_options=options)
    return saves.count


@pytest.mark.sample(1)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_from_any_hook_is_the_one_of_ddp(ranks: Ranks, tmp_path: Path, hook: str, sharded: bool) -> None:
    """Also in the middle of an accumulation window, whose gradients are in no checkpoint."""
    options = {"use_distributed_optimizer": sharded}
    counts = ranks.run(fit_saving_in, "megatron_ddp", hook, tmp_path / "ours", options)
    assert counts == ranks.run(fit_saving_in, "ddp", hook, tmp_path / "ddp", {})
    assert counts[0] == counts[1] > 0
    for number in range(counts[0]):
        ours, theirs = (load(tmp_path / kind / f"{number:03}.ckpt") for kind in ("ours", "ddp"))
        assert_same_value(ours, theirs, f"{hook} {number}")


def save_on_rank_zero_alone(path: Path, hook: str) -> None:
    """A mistake under "ddp", too, where it hangs in the barrier at the end of save_checkpoint."""
    fit("megatron_ddp", callbacks=[SavesOnRankZero(path, hook)], max_epochs=1)


class SavesOnRankZero(pl.Callback):
    def __init__(self, path: Path, hook: str) -> None:
        self.path = path
        setattr(self, hook, self.save)

    def save(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.fit_loop.batch_idx == 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_train_batch_end"])
def test_saving_on_rank_zero_alone_says_so(ranks: Ranks, tmp_path: Path, hook: str) -> None:
    """The other rank is in the step, or waits before its next batch."""
    zero, one = ranks.outcomes(save_on_rank_zero_alone, tmp_path / "last.ckpt", hook)
    assert zero.kind == "NotOnAllRanksError"
    assert "rank 1 is elsewhere, waiting in all-" in zero.message
    assert one.kind == "CollectiveError"
    assert max(zero.seconds, one.seconds) < 30
    assert not list(tmp_path.iterdir())


def test_torch_save_of_the_optimizer_on_rank_zero_says_so(ranks: Ranks) -> None:
    zero, one = ranks.outcomes(save_optimizer_by_hand)
    assert zero.kind == "NotOnAllRanksError"
    assert "if rank == 0:\n        torch.save(state, path)" in zero.message
    assert one.kind == "CollectiveError"


def save_optimizer_by_hand() -> None:
    fit("megatron_ddp", callbacks=[SavesByHand()], max_epochs=1)


class SavesByHand(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            torch.save(trainer.optimizers[0].state_dict(), "/dev/null")
