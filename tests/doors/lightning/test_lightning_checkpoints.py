"""Checkpoints are those that ``"ddp"`` writes, from any hook, and training goes on from them under either strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..fits import BATCHES_PER_EPOCH, AwkwardModule, Fit, adamw, assert_same_fit, assert_same_tensors, fit
from ..matrix import MODES
from ..rank_processes import Ranks


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adagrad(params: Any) -> Optimizer:
    """Has state before the first step."""
    return torch.optim.Adagrad(params, lr=0.02, initial_accumulator_value=0.1)


def amsgrad_in_groups(params: Any) -> Optimizer:
    first, second, *rest = params
    groups = [{"params": [second, first], "lr": 3e-3}, {"params": []}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def plain_sgd(params: Any) -> Optimizer:
    """Has no state at all."""
    return torch.optim.SGD(params, lr=0.05)


def decay(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, half_every_five_steps)


def half_every_five_steps(step: int) -> float:
    return 0.5 ** (step // 5)


def fit_and_save(
    name: str, folder: str, optimizer: Callable[[Any], Optimizer] = adamw, *, every: int = 10, **options: Any
) -> Fit:
    """Two epochs with a checkpoint ``step=<n>.ckpt`` every few steps."""
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=every, save_top_k=-1, save_on_train_epoch_end=False
    )
    module = AwkwardModule(optimizer, decay, "step")
    return fit(name, module=module, callbacks=[saver], enable_checkpointing=True, **options)


def resume(name: str, path: str, optimizer: Callable[[Any], Optimizer] = adamw, **options: Any) -> Fit:
    return fit(name, module=AwkwardModule(optimizer, decay, "step"), ckpt_path=path, **options)


def load(path: Path) -> dict[str, Any]:
    """Also a test: a checkpoint holds plain types only."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def assert_same_value(actual: Any, expected: Any, where: str) -> None:
    """Equal in structure and type; tensors in dtype, shape, strides and bits. The order of keys may differ."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for key, value in expected.items():
            assert_same_value(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for place, value in enumerate(expected):
            assert_same_value(actual[place], value, f"{where}[{place}]")
    elif isinstance(expected, Tensor):
        assert actual.stride() == expected.stride(), where
        assert actual.device == expected.device, where
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert actual == expected, where


@pytest.mark.parametrize(
    ("optimizer", "sharded"), [(adagrad, True), (amsgrad_in_groups, True), (plain_sgd, True), (sgd, False)]
)
def test_checkpoint_is_what_ddp_writes(
    ranks: Ranks, tmp_path: Path, optimizer: Callable[[Any], Optimizer], sharded: bool
) -> None:
    """Everything in the file, with the same types: whatever reads ddp's checkpoints reads ours."""
    options = {"strategy_options": {"use_distributed_optimizer": sharded}}
    ranks.run(fit_and_save, "megatron_ddp", str(tmp_path / "ours"), optimizer, **options)
    ranks.run(fit_and_save, "ddp", str(tmp_path / "ddp"), optimizer)
    ours, theirs = (load(tmp_path / folder / "step=10.ckpt") for folder in ("ours", "ddp"))
    for checkpoint in (ours, theirs):
        del checkpoint["callbacks"]  # ModelCheckpoint's paths, which differ
    assert len(theirs["optimizer_states"]) == 1
    if optimizer is not plain_sgd:
        assert len(theirs["optimizer_states"][0]["state"]) >= 9
    assert_same_value(ours, theirs, "checkpoint")


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "sharded": ("megatron_ddp", {}),
    "replicated": ("megatron_ddp", {"use_distributed_optimizer": False}),
    "other buckets": ("megatron_ddp", {"bucket_size": 400}),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [("ddp", "sharded"), ("sharded", "ddp"), ("replicated", "other buckets"), ("sharded", "replicated")],
)
def test_resuming_equals_an_uninterrupted_fit(ranks: Ranks, tmp_path: Path, first: str, second: str) -> None:
    """Losses after the interruption and final weights to the bit, whichever strategy wrote and whichever reads."""
    (writer, written_with), (reader, read_with) = KINDS[first], KINDS[second]
    whole = ranks.run(fit_and_save, writer, str(tmp_path), every=BATCHES_PER_EPOCH, strategy_options=written_with)
    resumed = ranks.run(resume, reader, str(tmp_path / f"step={BATCHES_PER_EPOCH}.ckpt"), strategy_options=read_with)
    for mine, expected in zip(resumed, whole, strict=True):
        assert len(expected.losses) == 2 * BATCHES_PER_EPOCH
        assert mine.losses == expected.losses[BATCHES_PER_EPOCH:]
        assert_same_tensors(mine.weights, expected.weights)


def test_resuming_within_an_epoch_equals_ddp(ranks: Ranks, tmp_path: Path) -> None:
    """Lightning itself starts the data anew there, so the measure is what ddp makes of the same file."""
    ranks.run(fit_and_save, "megatron_ddp", str(tmp_path))
    path = str(tmp_path / "step=10.ckpt")
    ours, theirs = (ranks.run(resume, name, path) for name in ("megatron_ddp", "ddp"))
    for mine, expected in zip(ours, theirs, strict=True):
        assert 0 < len(mine.losses) < BATCHES_PER_EPOCH
        assert_same_fit(mine, expected)


def small_steps(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=5e-4, weight_decay=0.0)


# --- saves in hooks --------------------------------------------------------------------------------------------------


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
"""In each of them a user may save; "on_before_backward" is between forward and backward."""


class SavesInEachHook(pl.Callback):
    """Saves each time that a hook is called; gradients are accumulated over three batches meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, list[str]()
        for hook in HOOKS:
            setattr(self, hook, functools.partial(self.save, hook))

    def save(self, hook: str, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.names.append(f"{len(self.names):03}-{hook}.ckpt")
            trainer.save_checkpoint(self.folder / self.names[-1])


def fit_saving_in_hooks(name: str, folder: Path, options: dict[str, Any]) -> list[str]:
    saves = SavesInEachHook(folder)
    fit(name, callbacks=[saves], accumulate_grad_batches=3, max_epochs=1, strategy_options=options)
    return saves.names


@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_from_any_hook_is_that_of_ddp(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """Also in the middle of an accumulation window, whose gradients are in no checkpoint."""
    [names, others] = ranks.run(fit_saving_in_hooks, "megatron_ddp", tmp_path / "ours", MODES[mode])
    assert [names] * 2 == [others, ranks.run(fit_saving_in_hooks, "ddp", tmp_path / "ddp", {})[0]]
    assert {name[4:-5] for name in names} == set(HOOKS)
    for name in names:
        ours, theirs = (load(tmp_path / kind / name) for kind in ("ours", "ddp"))
        assert_same_value(ours, theirs, name)


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


def test_torch_save_on_rank_zero_says_so(ranks: Ranks) -> None:
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
