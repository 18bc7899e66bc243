"""Learns to distinguish prose from code, line by line, in a plain loop with Hugging Face Accelerate. Only the import of
``Accelerator`` is megastrategy's.

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_text.py              # two GPUs
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 \\
        examples/accelerate_text.py                                                          # two processes on the CPU
    ... examples/accelerate_text.py --engine accelerate                                      # the same under torch DDP

The lines are those of Python's standard library: of docstrings, and of the code around them. Writes OUT/ENGINE/last, a
checkpoint with which ``--resume`` goes on, under either engine and on any number of processes, and
OUT/ENGINE/model.safetensors; losses are in nats a line.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import random
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

MODULES = (
    "argparse",
    "calendar",
    "configparser",
    "csv",
    "datetime",
    "difflib",
    "heapq",
    "inspect",
    "logging",
    "mailbox",
)
MODULES += ("optparse", "pathlib", "pickletools", "random", "socket", "statistics", "subprocess", "tarfile", "zipfile")
NUM_LINES, NUM_TEST = 3000, 500
WIDTH = 64  # bytes of a line that are read


def read_lines() -> list[tuple[str, int]]:
    """(line, 1 for prose and 0 for code), as many of either, in an order of chance that is always the same."""
    prose, code = [], []
    for name in MODULES:
        path = importlib.import_module(name).__file__
        source = Path(str(path)).read_text(encoding="utf-8")
        inside: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                inside.update(range(node.body[0].lineno, int(node.body[0].end_lineno or 0) + 1))
        for number, line in enumerate(source.splitlines(), start=1):
            text = line.strip().strip('"').strip()
            if len(text) >= 20 and not text.startswith(("#", ">>>")):
                (prose if number in inside else code).append(text)
    chance = random.Random(0)
    lines = [(line, 1) for line in chance.sample(prose, NUM_LINES // 2)]
    lines += [(line, 0) for line in chance.sample(code, NUM_LINES // 2)]
    chance.shuffle(lines)
    return lines


def make_datasets() -> tuple[TensorDataset, TensorDataset]:
    """(lines as bytes, labels) to train and to test on; 0 fills up short lines."""
    lines = read_lines()
    texts = torch.zeros(len(lines), WIDTH, dtype=torch.long)
    for row, (line, _) in zip(texts, lines, strict=True):
        content = list(line.encode()[:WIDTH])
        row[: len(content)] = torch.tensor(content)
    labels = torch.tensor([label for _, label in lines])
    test, train = slice(NUM_TEST), slice(NUM_TEST, None)
    return TensorDataset(texts[train], labels[train]), TensorDataset(texts[test], labels[test])


class LineClassifier(nn.Module):
    """Bytes, their contents in windows of five, and the strongest of that in the line."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width, padding_idx=0)
        self.windows = nn.Conv1d(width, width, 5, padding=2)
        self.head = nn.Linear(width, 2)

    def forward(self, texts: Tensor) -> Tensor:
        seen = torch.relu(self.windows(self.embed(texts).transpose(1, 2)))
        return self.head(seen.amax(dim=2))


@torch.no_grad()
def accuracy(accelerator: accelerate.Accelerator, model: nn.Module, data: Any) -> float:
    """The share of all processes' lines with the right answer; each line counts once."""
    model.eval()
    right = []
    for texts, labels in data:
        guesses = model(texts).argmax(dim=1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        right.append(guesses == labels)
    model.train()
    return torch.cat(right).float().mean().item()


class Progress:
    """Keeps how far training is, for ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def train(accelerator: accelerate.Accelerator, args: argparse.Namespace) -> None:
    """Trains, saves after every epoch, and says how good the model is."""
    accelerate.utils.set_seed(args.seed)
    train_set, test_set = make_datasets()
    model = LineClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batches = accelerator.num_processes * args.batch_size * args.accumulate
    steps = args.epochs * -(-len(train_set) // batches) * accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    model, optimizer, scheduler, train_data, test_data = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(train_set, args.batch_size), DataLoader(test_set, args.batch_size)
    )
    progress, folder = Progress(), args.out / args.engine
    accelerator.register_for_checkpointing(progress)
    if args.resume is not None:
        accelerator.load_state(str(args.resume))
    while progress.epoch < args.epochs:
        total = torch.zeros((), device=accelerator.device)
        for texts, labels in train_data:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(texts), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.clip > 0:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total, reduction="mean").item() / len(train_data)
        score = accuracy(accelerator, model, test_data)
        progress.epoch += 1
        accelerator.print(f"epoch {progress.epoch}: loss {mean:.6f}, {score:.1%} of {NUM_TEST} lines told right")
        accelerator.wait_for_everyone()
        accelerator.save_state(str(folder / "last"))
    accelerator.save_model(model, str(folder))
    accelerator.print(f"\n{args.engine}, {accelerator.num_processes} process(es): {score:.1%}, {folder}")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--engine", default="megatron_ddp", choices=["megatron_ddp", "accelerate"], help="whose")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="lines a process a backward")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards a step")
    parser.add_argument("--clip", type=float, default=1.0, help="the norm that gradients are clipped to; 0: not")
    parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--seed", type=int, default=1, help="of the weights")
    parser.add_argument("--resume", type=Path, default=None, metavar="DIR", help="a checkpoint to go on from")
    parser.add_argument("--out", type=Path, default=Path("runs/text"), metavar="DIR", help="where to write")
    args = parser.parse_args()
    options = {"gradient_accumulation_steps": args.accumulate, "mixed_precision": args.mixed_precision}
    if args.engine == "megatron_ddp":
        accelerator = Accelerator(megatron_ddp_plugin=MegatronDDPPlugin(bucket_size=10_000), **options)
    else:
        accelerator = accelerate.Accelerator(**options)
    train(accelerator, args)


if __name__ == "__main__":
    main()
