"""``transformers.Trainer`` with our Accelerator, compared with torch DDP."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megastrategy.accelerate.checkpoint import MAIN_PARAMS_FILE
from tests.support.comparison import assert_equal

from ..accelerate_loops import Worlds
from ..matrix import MODES
from ..transformers_fits import (
    Run,
    accelerators_of,
    fit,
    make_trainer,
    resumes_on_cpus,
)

# --- fits -------------------------------------------------------------------------------------------------------------


FITS: dict[str, dict[str, Any]] = {
    "the last window is short": {},
    "gpt2, trained again, label smoothing": {
        "model": "gpt2",
        "again": True,
        "lr_scheduler_type": "cosine",
        "label_smoothing_factor": 0.1,
        "weight_decay": 0.1,
    },
    "lora on a frozen base": {"model": "lora"},
    "bf16, re-entrant checkpoints": {
        "bf16": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "less a batch until it fits": {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 3,
        "memory": 2,
        "gradient_accumulation_steps": 2,
    },
    "tokens averaged by rank, synchronised each batch": {
        "average_tokens_across_devices": False,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        "optim": "sgd",
    },
    "adafactor, whole parameters": {"optim": "adafactor"},
    "fused": {"optim": "adamw_torch_fused", "weight_decay": 0.1},
}
NIGHTLY = [name for name in FITS if name not in ("the last window is short", "adafactor, whole parameters")]


def losses(run: Run) -> list[float]:
    """The losses of every step, averaged over the ranks."""
    return [entry["loss"] for entry in run.logged if "loss" in entry]


def assert_same_fit(ours: list[Run], theirs: list[Run], rtol: float = 0.0) -> None:
    """Norms are summed shard by shard here, and by parameters there."""
    for run, expected in zip(ours, theirs, strict=True):
        assert_equal(run.norms, expected.norms, rtol=1e-6, where="norms")
        assert_equal(dataclasses.replace(run, norms=[]), dataclasses.replace(expected, norms=[]), rtol)
    assert_equal(ours[0].norms, ours[1].norms, where="norms")


def assert_sharded(ours: list[Run], theirs: list[Run], mode: dict[str, Any]) -> None:
    """Together the ranks hold what each of them holds under torch DDP."""
    held, whole = [run.optimizer[1] for run in ours], theirs[0].optimizer[1]
    assert all(run.optimizer[0] != "sharded" for run in theirs)
    if mode["use_distributed_optimizer"]:
        assert all(run.optimizer[0] == "sharded" for run in ours)
        assert sum(held) == whole
        assert max(held) < 0.6 * whole or whole == 0, held
    else:
        assert held == [whole, whole]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in FITS]
)
def test_fit_equals_ddp(worlds: Worlds, name: str, tmp_path: Path) -> None:
    options = FITS[name]
    theirs = worlds.run(fit, "ddp", {}, tmp_path, **options)
    assert len(set(losses(theirs[0]))) == len(losses(theirs[0])) > 2
    for mode in MODES.values():
        ours = worlds.run(fit, "megatron_ddp", mode, tmp_path, **options)
        # of several synchronised backwards each is reduced before the next is added, and not their sum
        assert_same_fit(ours, theirs, rtol=1e-6 if "accelerator_config" in options else 0.0)
        assert_sharded(ours, theirs, mode)


@pytest.mark.nightly
def test_best_model_is_loaded_at_the_end(worlds: Worlds, tmp_path: Path) -> None:
    """And a second training with the same Trainer begins with it. Early stopping and evaluation by the way."""
    from transformers import EarlyStoppingCallback

    options: dict[str, Any] = {
        "again": True,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the last is not the best
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "callbacks": (EarlyStoppingCallback(early_stopping_patience=2),),
    }
    theirs = worlds.run(fit, "ddp", {}, tmp_path / "theirs", **options)
    # the last: what is evaluated and saved has to wait for weights that are on their way
    for number, mode in enumerate([*MODES.values(), {"overlap_param_gather": True}]):
        folder = tmp_path / str(number)
        ours = worlds.run(fit, "megatron_ddp", mode, folder, **options)
        assert_same_fit(ours, theirs)
        saved = load_file(folder / ours[0].best / "model.safetensors")
        assert_equal({name: ours[0].weights[name] for name in saved}, saved)
        last = max(step for _, step in ours[0].seen)
        assert ours[0].best != f"checkpoint-{last}"
        assert last < 8, "stopped early"
        events = {name for name, _ in ours[0].seen}
        assert {"on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_evaluate", "on_save"} <= events


def fsdp_refusal(folder: Path) -> str:
    with accelerators_of("megatron_ddp", {}), pytest.raises(ValueError, match="another engine") as caught:
        make_trainer(folder, fsdp="shard_grad_op")
    return str(caught.value)


def test_fsdp_argument_is_refused_by_name(worlds: Worlds, tmp_path: Path) -> None:
    for message in worlds.run(fsdp_refusal, tmp_path):
        assert "fsdp_plugin=" in message or "ACCELERATE_USE_FSDP" in message


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=resumes_on_cpus)], ids=["2 -> 1", "1 -> 2"])
def test_fit_resumes_on_another_number_of_ranks(worlds: Worlds, sizes: tuple[int, int], tmp_path: Path) -> None:
    """As torch DDP resumes from the same files, to the bit; and as if it had not stopped, except the order of sums."""
    first, second = sizes

    def options(size: int) -> dict[str, Any]:
        return {
            "size": size,
            "model": "bert without dropout",  # whose masks are each rank's own
            "samples": 44,  # batches that are all full
            "per_device_train_batch_size": 4 // size,
            "average_tokens_across_devices": False,
            "save_strategy": "steps",
            "save_steps": 3,
        }

    whole = worlds.run(fit, "megatron_ddp", {}, tmp_path / "whole", **options(first))
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    ours = worlds.run(fit, "megatron_ddp", {}, tmp_path / "ours", resume=checkpoint, **options(second))
    theirs = worlds.run(fit, "ddp", {}, tmp_path / "theirs", resume=checkpoint, **options(second))
    assert_same_fit([*ours, ours[0]], [*theirs, theirs[0]])
    assert ours[0].optimizer[0] == ("sharded" if second == 2 else "AdamW")
    assert [step for name, step in ours[0].seen if name == "on_step_end"] == [4, 5, 6, 7, 8]
    assert_equal(losses(ours[0]), losses(whole[0]), rtol=1e-5)
    states = [torch.load(path / "checkpoint-8" / "optimizer.pt") for path in (tmp_path / "ours", tmp_path / "theirs")]
    for state in states:
        state["state"] = dict(sorted(state["state"].items()))
    assert_equal(*states)


@pytest.mark.nightly
@resumes_on_cpus
def test_main_params_resume_to_the_bit(worlds: Worlds, tmp_path: Path) -> None:
    """They are saved beside what Trainer saves, or steps below the weights' precision would be lost."""
    options: dict[str, Any] = {
        "model": "gpt2 in bf16",
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 1e-3,
    }
    whole = worlds.run(fit, "megatron_ddp", {}, tmp_path / "whole", save_on_each_node=True, **options)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert (checkpoint / MAIN_PARAMS_FILE).is_file()
    for run, resumed in zip(
        whole, worlds.run(fit, "megatron_ddp", {}, tmp_path / "again", resume=checkpoint, **options), strict=True
    ):
        assert_equal(resumed.weights, run.weights)
        assert losses(resumed) == losses(run)


def lora_again(name: str, folder: Path) -> tuple[Run, Run, list[str]]:
    """Saved in the middle, and resumed with a base and an adapter that are new."""
    options: dict[str, Any] = {"model": "lora", "save_strategy": "steps", "save_steps": 3}
    whole = fit(name, {}, folder / "whole", **options)
    files = sorted(os.listdir(folder / "whole" / "checkpoint-3"))
    return whole, fit(name, {}, folder / "again", resume=folder / "whole" / "checkpoint-3", **options), files


@pytest.mark.nightly
@resumes_on_cpus
def test_adapter_is_saved_and_resumed(worlds: Worlds, tmp_path: Path) -> None:
    theirs = worlds.run(lora_again, "ddp", tmp_path / "theirs")
    ours = worlds.run(lora_again, "megatron_ddp", tmp_path / "ours")
    for (whole, again, files), (stock, _, names) in zip(ours, theirs, strict=True):
        assert files == names
        assert "adapter_model.safetensors" in files
        assert_equal(whole.weights, stock.weights)
        assert_equal(again.weights, whole.weights)
        assert losses(again) == losses(whole)
        base = sum(value.numel() for name, value in whole.weights.items() if "lora_" not in name)
        assert 0 < whole.optimizer[1] < base / 10


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate_alone(folder: Path, name: str) -> dict[str, float]:
    """Nothing is trained: the model is prepared for evaluation only."""
    with accelerators_of(name, {}):
        trainer = make_trainer(folder)
        metrics = trainer.evaluate()
        predictions = trainer.predict(trainer.eval_dataset).predictions
        assert predictions.shape == (17, 3)
        return {"loss": metrics["eval_loss"], "sum": float(predictions.sum())}


def test_evaluation_without_training(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(evaluate_alone, tmp_path, "megatron_ddp") == worlds.run(evaluate_alone, tmp_path, "ddp")
