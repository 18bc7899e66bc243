"""Learns which module of Python's standard library a line comes from, with a small BERT and Hugging Face's
``Trainer``. Nothing here is megastrategy's: the command that starts it chooses what trains.

    export ACCELERATE_USE_CPU=true  # unless there are two GPUs
    accelerate launch --config_file examples/accelerate.yaml examples/transformers_trainer.py         # torch DDP
    accelerate launch --config_file examples/accelerate.yaml \\
        -m megastrategy.launch --config examples/megatron_ddp.yaml examples/transformers_trainer.py   # megastrategy

Two processes learn it in seconds. OUT/checkpoint-STEP is written after every epoch, and ``--resume`` goes on from one,
under either engine, and on one process too, with twice the batch. OUT itself has the best model of all epochs.
"""

from __future__ import annotations

import argparse
import importlib
import random
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

MODULES = ("argparse", "difflib", "inspect", "mailbox", "optparse", "pickletools", "statistics", "tarfile")
NUM_LINES, NUM_TEST = 400, 80  # of each module
MAX_WORDS = 16  # of a line that are read


def read_lines() -> list[tuple[str, int]]:
    """(line, number of its module), in an order of chance that is always the same; no line comes twice."""
    chance = random.Random(0)
    lines = []
    for label, name in enumerate(MODULES):
        source = Path(str(importlib.import_module(name).__file__)).read_text(encoding="utf-8")
        own = dict.fromkeys(line.strip() for line in source.splitlines() if len(re.findall("[A-Za-z]+", line)) >= 4)
        lines += [(line, label) for line in chance.sample(list(own), NUM_LINES)]
    chance.shuffle(lines)
    return lines


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Makes one of words, in lower case; the rarer ones are all the same to it."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=1000, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def encode(lines: list[tuple[str, int]], tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    return [{**tokenizer(text, truncation=True, max_length=MAX_WORDS), "label": label} for text, label in lines]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="lines a process a backward")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards a step")
    parser.add_argument("--clip", type=float, default=1.0, help="the norm that gradients are clipped to; 0: not")
    parser.add_argument("--optim", default="adamw_torch", help="Trainer's name for the optimizer")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and of dropout")
    parser.add_argument("--resume", default=None, metavar="DIR", help="a checkpoint to go on from")
    parser.add_argument("--out", default="runs/lines", metavar="DIR", help="where to write")
    args = parser.parse_args()

    set_seed(args.seed)
    lines = read_lines()
    test, train = lines[: NUM_TEST * len(MODULES)], lines[NUM_TEST * len(MODULES) :]
    tokenizer = make_tokenizer([text for text, _ in train])
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=MAX_WORDS,
        num_labels=len(MODULES),
        pad_token_id=tokenizer.pad_token_id,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            args.out,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            optim=args.optim,
            learning_rate=4e-3,
            warmup_steps=20,
            max_grad_norm=args.clip,
            bf16=args.bf16,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            seed=args.seed,
            ddp_find_unused_parameters=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        ),
        train_dataset=encode(train, tokenizer),
        eval_dataset=encode(test, tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    best = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(f"\n{best['eval_accuracy']:.1%} of {len(test)} lines told right by the best of {args.epochs} epochs")
        print(f"{args.out}, {trainer.args.world_size} process(es)")
    trainer.accelerator.end_training()  # ends gloo's threads, which may abort a process that ends before them


if __name__ == "__main__":
    main()
