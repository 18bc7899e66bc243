"""Jobs for tests of ``transformers.Trainer``: small models from configs, with dropout, and all that can be seen."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from ..support.data_path import kept_numel
from .accelerate_loops import weights_of

NUM_TOKENS, LENGTH, NUM_LABELS = 31, 12, 3
NUM_SAMPLES = 43
"""Of two a rank: 11 batches on two ranks, the last one filled up; in threes 3, 3, 3 and 2 of them."""

BUCKET_SIZE = 600
resumes_on_cpus = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="Transformers 5.17 asks torch.load for the device cpu:0 when it resumes on several CPU ranks, which torch "
    "refuses, under torch DDP too; 5.23 does not",
)

OF_A_CLOCK = ("runtime", "preparation_time", "samples_per_second", "steps_per_second", "total_flos")


@dataclasses.dataclass
class Run:
    """The results of a Trainer on one rank.

    Attributes:
        logged: without clocks and norms.
        norms: of the gradients, as logged.
        weights: the module's.
        seen: what the callback was called with, by name and step.
        best: the checkpoint that was loaded in the end.
        optimizer: the class inside of accelerate's, and how many elements of state (except for counters) this rank has.
    """

    logged: list[dict[str, float]]
    norms: list[float]
    weights: dict[str, Tensor]
    seen: list[tuple[str, int]]
    best: str = ""
    optimizer: tuple[str, int] = dataclasses.field(default=("", 0), compare=False)


def make_bert(dropout: float = 0.1) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=28,
        max_position_embeddings=LENGTH,
        num_labels=NUM_LABELS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def make_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=NUM_TOKENS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def make_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(make_gpt2(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": make_bert,
    "bert without dropout": functools.partial(make_bert, 0.0),
    "gpt2": make_gpt2,
    "gpt2 in bf16": lambda: make_gpt2().bfloat16(),
    "lora": make_lora,
}


def make_data(kind: str, number: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(number):
        tokens = torch.randint(1, NUM_TOKENS, (LENGTH,), generator=generator)
        sample: dict[str, Any] = {"input_ids": tokens}
        if kind.startswith("bert"):
            read = torch.randint(3, LENGTH + 1, (), generator=generator)
            sample |= {"attention_mask": (torch.arange(LENGTH) < read).long(), "labels": int(tokens[0]) % NUM_LABELS}
        else:
            sample["labels"] = tokens
        samples.append(sample)
    return samples


@contextlib.contextmanager
def accelerators_of(name: str, mode: dict[str, Any]) -> Iterator[None]:
    """``transformers.Trainer`` makes accelerate's own Accelerator, or ours; leaves the environment as it was."""
    import transformers.trainer

    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

    plugin = MegatronDDPPlugin(**{"bucket_size": BUCKET_SIZE, **mode})
    environment, theirs = dict(os.environ), transformers.trainer.Accelerator
    if name == "megatron_ddp":
        transformers.trainer.Accelerator = functools.partial(Accelerator, megatron_ddp_plugin=plugin)
    try:
        yield
    finally:
        transformers.trainer.Accelerator = theirs
        os.environ.clear()
        os.environ.update(environment)


def make_trainer(
    folder: Path,
    *,
    model: str = "bert",
    samples: int = NUM_SAMPLES,
    memory: int | None = None,
    callbacks: tuple[Any, ...] = (),
    **arguments: Any,
) -> Any:
    """A quiet Trainer of eight steps.

    Args:
        folder: where it writes.
        model: which.
        samples: to train on.
        memory: of samples a batch; with more of them a forward runs out of it.
        callbacks: more than the one that keeps what it saw.
        arguments: of TrainingArguments.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Seen(TrainerCallback):
        def __init__(self) -> None:
            self.events: list[tuple[str, int]] = []

    def keeping(event: str) -> Any:
        def keep(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.events.append((event, state.global_step))

        return keep

    for event in [name for name in vars(TrainerCallback) if name.startswith("on_") and name != "on_init_end"]:
        setattr(Seen, event, keeping(event))

    class TestedTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if memory is not None and len(inputs["input_ids"]) > memory:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return loss

    options: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 3,
        # Trainer's own choice is fused, and rounds the last elements of a tensor differently on CPUs
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
    }
    args = TrainingArguments(str(folder), **(options | arguments))
    trainer = TestedTrainer(
        MODELS[model](),
        args,
        train_dataset=make_data(model, samples),
        eval_dataset=make_data(model, 17),
        callbacks=[Seen(), *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def result(trainer: Any) -> Run:
    history = trainer.state.log_history
    entries = [{key: value for key, value in entry.items() if not key.endswith(OF_A_CLOCK)} for entry in history]
    norms = [entry.pop("grad_norm") for entry in entries if "grad_norm" in entry]
    inner = trainer.optimizer.optimizer
    [seen] = [item.events for item in trainer.callback_handler.callbacks if type(item).__name__ == "Seen"]
    return Run(
        entries,
        norms,
        weights_of(trainer.model),
        list(seen),
        os.path.basename(trainer.state.best_model_checkpoint or ""),
        _kept(inner),
    )


def _kept(optimizer: Any) -> tuple[str, int]:
    """The optimizer's kind, and how many numbers its state has on this rank, by element of the parameters."""
    from megastrategy import DistributedOptimizer

    if isinstance(optimizer, DistributedOptimizer) and optimizer.is_sharded:
        return "sharded", kept_numel(optimizer)
    tensors = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return type(optimizer).__name__, sum(value.numel() for value in tensors if value.numel() > 1)


def fit(
    name: str, mode: dict[str, Any], folder: Path, *, resume: Path | None = None, again: bool = False, **options: Any
) -> Run:
    """Trains, under torch DDP or ours; ``again``: evaluates, and trains once more with the same Trainer."""
    with accelerators_of(name, mode):
        trainer = make_trainer(folder, **options)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        if again:
            trainer.evaluate()
            trainer.train()
        return result(trainer)
