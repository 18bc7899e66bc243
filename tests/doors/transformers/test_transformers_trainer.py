"""``transformers.Trainer`` with our Accelerator, compared with torch DDP feature by feature; the launcher's own test is
``test_launch_trainer.py``."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.comparison import assert_equal

from ..accelerate_loops import Worlds
from ..matrix import MODES
from ..transformers_fits import MODELS, Run, accelerators_of, fit, make_trainer, resumes_on_cpus

FITS: dict[str, dict[str, Any]] = {
    "accumulated, the last window is short": {},
    "evaluated, and trained again": {"again": True, "gradient_accumulation_steps": 1, "lr_scheduler_type": "cosine"},
    "gpt2, label smoothing": {"model": "gpt2", "label_smoothing_factor": 0.1, "weight_decay": 0.1},
    "lora on a frozen base": {"model": "lora"},
    "bf16, checkpointed activations": {"bf16": True, "gradient_checkpointing": True},
    "re-entrant checkpoints": {
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
}


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", FITS.values(), ids=FITS)
def test_a_fit_ends_in_the_bits_of_torch_ddp(worlds: Worlds, options: dict[str, Any], tmp_path: Path) -> None:
    theirs = worlds.run(fit, "ddp", {}, tmp_path, **options)
    assert len(set(losses(theirs[0]))) == len(losses(theirs[0])) > 2
    for mode in MODES.values():
        ours = worlds.run(fit, "megatron_ddp", mode, tmp_path, **options)
        # of several synchronised backwards each is reduced before the next is added, and not their sum
        assert_same_fit(ours, theirs, rtol=1e-6 if "accelerator_config" in options else 0.0)
        assert_sharded(ours, theirs, mode)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ends_in", ["begin", "backward", "second step"])
def test_auto_find_batch_size_trains_as_torch_ddp(worlds: Worlds, ends_in: str, tmp_path: Path) -> None:
    options = {**FITS["less a batch until it fits"], "ends_in": ends_in, "lr_scheduler_type": "cosine"}
    theirs = worlds.run(fit, "ddp", {}, tmp_path, **options)
    for mode in MODES.values():
        ours = worlds.run(fit, "megatron_ddp", mode, tmp_path, **options)
        assert_same_fit(ours, theirs)
        assert_sharded(ours, theirs, mode)


@pytest.mark.long
def test_torch_compile(worlds: Worlds, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": "plain",
        "torch_compile": True,
        "torch_compile_backend": "eager",  # it is traced and guarded as with others, and not translated
    }
    theirs = worlds.run(fit, "ddp", {}, tmp_path, **options)
    ours = worlds.run(fit, "megatron_ddp", {}, tmp_path, **options)
    assert_same_fit(ours, theirs)
    assert all(run.frames > 0 for run in [*theirs, *ours]), "it was compiled"


@pytest.mark.sample(1)
@pytest.mark.parametrize("norm", [0.5, 100.0])
def test_max_grad_norm(worlds: Worlds, norm: float, tmp_path: Path) -> None:
    # not Adam: the gradients of biases of attention keys are rounding and nothing else, which Adam would make steps of
    options: dict[str, Any] = {"max_grad_norm": norm, "optim": "sgd"}
    theirs = worlds.run(fit, "ddp", {}, tmp_path, **options)
    assert 0.5 < min(theirs[0].norms) < max(theirs[0].norms) < 100.0
    for mode in MODES.values():
        ours = worlds.run(fit, "megatron_ddp", mode, tmp_path, **options)
        assert_same_fit(ours, theirs, rtol=1e-6 if norm == 0.5 and mode["use_distributed_optimizer"] else 0.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("norm", [0.0, 0.5])
def test_fp16_with_an_infinite_loss_on_one_rank(worlds: Worlds, norm: float, tmp_path: Path) -> None:
    """Both ranks skip that step, clipped or not, the scheduler waits, and the rest is as under torch DDP."""
    options: dict[str, Any] = {"fp16": True, "inf_on": (1, 2), "optim": "sgd", "max_grad_norm": norm}
    theirs = worlds.run(fit, "ddp", {}, tmp_path, **options)
    rates = [entry["learning_rate"] for entry in theirs[0].logged if "learning_rate" in entry]
    assert [number for number in range(1, 8) if rates[number] == rates[number - 1]] == [3]
    for mode in MODES.values():
        ours = worlds.run(fit, "megatron_ddp", mode, tmp_path, **options)
        assert_same_fit(ours, theirs, rtol=1e-6 if norm and mode["use_distributed_optimizer"] else 0.0)


@pytest.mark.long
def test_the_best_model_is_loaded_at_the_end(worlds: Worlds, tmp_path: Path) -> None:
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


# --- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
def test_element_wise_optimizers_of_trainers_names_shard(worlds: Worlds, optim: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optim": optim, "weight_decay": 0.1}
    theirs = worlds.run(fit, "ddp", {}, tmp_path, **options)
    ours = worlds.run(fit, "megatron_ddp", {}, tmp_path, **options)
    assert_sharded(ours, theirs, MODES["reduce-scatter"])
    assert_same_fit(ours, theirs)


def fsdp_refusal(folder: Path) -> str:
    with accelerators_of("megatron_ddp", {}), pytest.raises(ValueError, match="another engine") as caught:
        make_trainer(folder, fsdp="shard_grad_op")
    return str(caught.value)


def test_fsdp_among_trainers_arguments_is_refused_by_name(worlds: Worlds, tmp_path: Path) -> None:
    for message in worlds.run(fsdp_refusal, tmp_path):
        assert "fsdp_plugin=" in message or "ACCELERATE_USE_FSDP" in message


def test_adafactor_is_sharded_by_whole_parameters(worlds: Worlds, tmp_path: Path) -> None:
    theirs = worlds.run(fit, "ddp", {}, tmp_path / "theirs", optim="adafactor")
    for mode in MODES.values():
        ours = worlds.run(fit, "megatron_ddp", mode, tmp_path / "ours", optim="adafactor")
        assert_same_fit(ours, theirs)
        assert_sharded(ours, theirs, mode)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=resumes_on_cpus)], ids=["2 -> 1", "1 -> 2"])
def test_resuming_on_another_number_of_ranks(worlds: Worlds, sizes: tuple[int, int], tmp_path: Path) -> None:
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


def losses(run: Run) -> list[float]:
    """The losses of every step, averaged over the ranks."""
    return [entry["loss"] for entry in run.logged if "loss" in entry]


def lora_again(name: str, folder: Path) -> tuple[Run, Run, list[str]]:
    """Saved in the middle, and resumed with a base and an adapter that are new."""
    options: dict[str, Any] = {"model": "lora", "save_strategy": "steps", "save_steps": 3}
    whole = fit(name, {}, folder / "whole", **options)
    files = sorted(os.listdir(folder / "whole" / "checkpoint-3"))
    return whole, fit(name, {}, folder / "again", resume=folder / "whole" / "checkpoint-3", **options), files


@pytest.mark.long
@resumes_on_cpus
def test_an_adapter_is_saved_and_resumed(worlds: Worlds, tmp_path: Path) -> None:
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


# --- without the launcher --------------------------------------------------------------------------------------------


def subclass_with_ours(folder: Path) -> tuple[dict[str, Any], str]:
    """A Trainer whose author makes the Accelerator, and which saves: by Trainer's way on one rank alone."""
    import transformers.trainer
    from transformers import Trainer

    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

    class OursTrainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            theirs = transformers.trainer.Accelerator
            transformers.trainer.Accelerator = functools.partial(Accelerator, megatron_ddp_plugin=MegatronDDPPlugin())
            try:
                super().create_accelerator_and_postprocess()
            finally:
                transformers.trainer.Accelerator = theirs

    stock = make_trainer(folder / "unused", save_strategy="epoch")
    args = stock.args
    args.output_dir = str(folder)
    trainer = OursTrainer(MODELS["bert"](), args, train_dataset=stock.train_dataset)
    trainer.train()
    state = trainer.optimizer.state_dict()
    return state, type(trainer.accelerator).__module__


def test_a_trainer_saves_without_the_launcher(worlds: Worlds, tmp_path: Path) -> None:
    (state, module), (_, other) = worlds.run(subclass_with_ours, tmp_path)
    assert module == other == "megastrategy.accelerate"
    assert_equal(torch.load(tmp_path / "checkpoint-8" / "optimizer.pt"), state)


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
