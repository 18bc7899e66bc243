"""Checkpoints are those that ``"ddp"`` writes, and training goes on from them under either strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..fits import BATCHES_PER_EPOCH, AwkwardModule, Fit, adamw, assert_same_fit, assert_same_tensors, fit
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("optimizer", [adamw, sgd, adagrad, amsgrad_in_groups, plain_sgd])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_is_what_ddp_writes(
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


PAIRS = [
    ("ddp", "sharded"),
    ("sharded", "ddp"),
    ("sharded", "sharded"),
    ("ddp", "replicated"),
    ("replicated", "sharded"),
    ("sharded", "other_buckets"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_resuming_equals_training_without_interruption(ranks: Ranks, tmp_path: Path, first: str, second: str) -> None:
    """Losses after the interruption and final weights to the bit, whichever strategy wrote and whichever reads."""
    whole = KINDS[first](ranks.run, fit_and_save)(str(tmp_path), every=BATCHES_PER_EPOCH)
    resumed = KINDS[second](ranks.run, resume)(str(tmp_path / f"step={BATCHES_PER_EPOCH}.ckpt"))
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


def _kind(name: str, **strategy_options: Any) -> Callable[..., Callable[..., list[Fit]]]:
    return lambda run, job: partial(run, job, name, strategy_options=strategy_options)


KINDS = {
    "ddp": _kind("ddp"),
    "sharded": _kind("megatron_ddp"),
    "replicated": _kind("megatron_ddp", use_distributed_optimizer=False),
    "other_buckets": _kind("megatron_ddp", bucket_size=400),
}


def small_steps(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=5e-4, weight_decay=0.0)
