"""Trains a small byte-level GPT on real text with PyTorch Lightning; nothing here is megastrategy's but the strategy.

    python examples/train_gpt.py                           # two processes, the reference text that ships with CPython
    python examples/train_gpt.py --data FILE --steps 2000  # your own text
    python examples/train_gpt.py --steps 100 --compare     # the same run under "ddp" too, both in one PNG: `make demo`

Writes OUT/loss.png, and OUT/STRATEGY/{metrics.csv,best.ckpt,last.ckpt}; losses are in nats a byte.

The loss jumps once or twice before step 30, and is back one step later. It is not a batch: every window of a batch has
the high loss, in one process without Lightning, too. While the model learns how often bytes are, the gradients of the
first block agree in sign, and AdamW moves each of their weights by the whole learning rate in one direction. The step
overshoots, and the next gradient, 50 to 200 times as large, turns it back. With a third of the rate jumps are smaller.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # bytes
HEAD_WIDTH = 32
MAX_VALIDATION_BYTES = 1 << 16  # of a text's last tenth, so that a long text does not mean long validations


class Block(nn.Module):
    """Pre-norm causal attention and MLP over (batch, time, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, width / heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(pl.LightningModule):
    """A byte-level GPT whose head shares the embedding's weight."""

    def __init__(self, context: int, width: int, depth: int, steps: int, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context, self.steps, self.lr = context, steps, lr
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight
        for param in self.parameters():
            if param.ndim == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes -> (batch, time, VOCABULARY) logits."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def _loss(self, windows: Tensor) -> Tensor:
        tokens = windows.long()
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        vectors = [p for p in self.parameters() if p.ndim != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        warmup = max(1, self.steps // 20)

        def factor(step: int) -> float:
            progress = min(1.0, max(0.0, (step - warmup) / max(1, self.steps - warmup)))
            return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))  # down to a tenth

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, temperature: float = 0.7) -> bytes:
        tokens = torch.tensor([list(prompt)], device=self.device)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(dim=-1), 1)], dim=1)
        return bytes(tokens[0].tolist())


class Windows(Dataset[Tensor]):
    """Windows of ``size`` bytes of a text at the given offsets."""

    def __init__(self, text: Tensor, starts: Tensor, size: int) -> None:
        self.text, self.starts, self.size = text, starts.tolist(), size

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return self.text[self.starts[index] : self.starts[index] + self.size]


class Throughput(pl.Callback):
    """Logs tokens a second over all ranks, from the end of one step to the end of the next.

    The first step, and the first after a validation, count from their own start: a short run may have no others.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step, self.last_s = tokens_per_step, math.nan

    def on_train_batch_start(self, *_: Any) -> None:
        if math.isnan(self.last_s):
            self.last_s = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        now_s = time.perf_counter()
        step_s, self.last_s = now_s - self.last_s, now_s
        pl_module.log("tokens/s", self.tokens_per_step / step_s)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.last_s = math.nan  # the next step would count the validation too


class Progress(pl.Callback):
    """Prints one short line for every tenth of the steps, on rank 0, which fits a terminal of 80 columns."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @rank_zero_only
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step, every = trainer.global_step, max(1, self.steps // 10)
        if step % every == 0 or step == self.steps:
            logged = trainer.callback_metrics
            losses = [f"{name} {logged[name]:.3f}" for name in ("train_loss", "val_loss") if name in logged]
            print(f"  step {step:>{len(str(self.steps))}}/{self.steps}", *losses, sep="   ", flush=True)


class MemoryTable(pl.Callback):
    """Keeps the table of memory that the strategy prints at the start of a fit, for the summary at the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        engine = getattr(trainer.strategy.model, "engine", None)  # torch DDP has no such table
        if engine is not None:
            described: list[str] = []
            engine.announce(described.append)
            lines = "\n".join(described).splitlines()
            first = next(number for number, line in enumerate(lines) if "bytes a rank" in line)
            self.lines = lines[first : first + 3]


def train(strategy: str, text: Tensor, args: argparse.Namespace) -> list[str]:
    """Fits once, and returns the strategy's table of memory. The same seed gives every strategy the same weights and
    the same windows in the same order."""
    pl.seed_everything(args.seed, verbose=False)
    size = args.context + 1  # one byte more than the model sees: the last target
    num_held_out = max(size, min(len(text) // 10, MAX_VALIDATION_BYTES))
    train_text, held_out = text[:-num_held_out], text[-num_held_out:]
    num_windows = args.steps * args.batch_size * args.devices
    train_set = Windows(train_text, torch.randint(len(train_text) - size + 1, (num_windows,)), size)
    val_set = Windows(held_out, torch.arange(0, len(held_out) - size + 1, size), size)
    # num_workers=0: the text is in memory, a worker would only take a core from the ranks
    train_loader, val_loader = (DataLoader(windows, args.batch_size, num_workers=0) for windows in (train_set, val_set))

    run_dir = args.out / strategy
    tokens_per_step = args.batch_size * args.devices * args.context
    memory = MemoryTable()
    checkpoint = ModelCheckpoint(run_dir, "best", monitor="val_loss", save_last=True, enable_version_counter=False)
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        strategy=strategy,
        max_epochs=1,
        val_check_interval=max(1, args.steps // 7),
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(args.out, name=strategy, version=""),
        callbacks=[Throughput(tokens_per_step), memory, Progress(args.steps), checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if trainer.is_global_zero:  # what an earlier run left, and nothing else that may be there
        for name in ("metrics.csv", "hparams.yaml", "best.ckpt", "last.ckpt"):
            (run_dir / name).unlink(missing_ok=True)
    trainer.fit(GPT(args.context, args.width, args.depth, args.steps), train_loader, val_loader)
    return memory.lines


def read_curve(run_dir: Path, column: str) -> dict[int, float]:
    """Step -> value, for the steps at which the column was logged."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row.get(column)}


def draw_losses(axes: Axes, args: argparse.Namespace, strategies: list[str]) -> None:
    """The second run is drawn over the first, thin and dark over thick and light."""
    for strategy, color, width in zip(strategies, ("C1", "black"), (4.0, 1.0), strict=False):
        for column, name, marker in (("train_loss", "training", ""), ("val_loss", "validation", "o")):
            curve = read_curve(args.out / strategy, column)
            look: dict[str, Any] = {
                "marker": marker,
                "markersize": 2 + 2 * width,
                "linewidth": width if not marker else 0,
            }
            axes.plot(list(curve), list(curve.values()), color=color, label=f"{strategy}, {name}", **look)
    axes.set_ylabel("loss, nats a byte")
    axes.set_title("Both learn the same, jumps included" if args.compare else "It learns", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def draw_difference(axes: Axes, first: dict[int, float], second: dict[int, float]) -> None:
    differences = [abs(first[step] - second[step]) for step in first]
    axes.fill_between(list(first), differences, step="mid", color="C1")
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set(ylim=(0, 1e-1), yticks=(0, 1e-6, 1e-4, 1e-2), xlabel="step", ylabel="difference")
    # The norm that clips is summed shard by shard under one, and by parameters under the other.
    axes.set_title(f"Their training losses differ by {max(differences):.0e} at most", fontsize=10)


def draw_memory(axes: Axes, table: list[str]) -> None:
    """``table``: a line of headings, one of megatron_ddp and one of ddp, as the strategy prints them."""
    names = [line.split()[0] for line in table[1:]]
    rows = [[float(number.replace(",", "")) for number in re.findall(r"([\d.,]+) [KM]iB", line)] for line in table[1:]]
    bottom = [0.0] * len(rows)
    for number, kind in enumerate(("parameters", "gradients", "optimizer")):
        heights = [row[number] for row in rows]
        axes.bar(names, heights, bottom=bottom, label=kind, color=f"C{number + 2}", width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set(ylabel=f"{table[1].split()[-1]} of a rank", ylim=(0, 1.25 * max(bottom)))
    axes.set_title("The optimizer is sharded", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def draw(memory: dict[str, list[str]], args: argparse.Namespace) -> None:
    """Draws OUT/loss.png. ``memory``: each strategy's table of memory, which torch DDP has none of."""
    strategies = sorted(memory)  # "ddp" comes first, and is drawn under the other
    table = next(filter(None, memory.values()), None)
    figure = Figure(figsize=(9, 5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(5, 2), height_ratios=(3, 1))
    losses = figure.add_subplot(grid[0 if args.compare else slice(None), 0 if table else slice(None)])
    draw_losses(losses, args, strategies)
    if args.compare:
        first, second = (read_curve(args.out / strategy, "train_loss") for strategy in strategies)
        draw_difference(figure.add_subplot(grid[1, 0], sharex=losses), first, second)
    else:
        losses.set_xlabel("step")
    if table:
        draw_memory(figure.add_subplot(grid[:, 1]), table)
    figure.savefig(args.out / "loss.png", dpi=120)


@rank_zero_only
def report(memory: dict[str, list[str]], args: argparse.Namespace) -> None:
    """Draws the picture, and prints a summary of the fits. ``memory``: each strategy's table of memory."""
    strategies = list(memory)
    losses: list[dict[int, float]] = []
    for strategy in strategies:
        run_dir = args.out / strategy
        train_loss, val_loss = read_curve(run_dir, "train_loss"), read_curve(run_dir, "val_loss")
        losses.append(train_loss)
        speed = median(read_curve(run_dir, "tokens/s").values())
        print(f"\n{strategy}, {args.devices} rank(s), {args.steps} steps")
        print(f"  training loss    {train_loss[min(train_loss)]:.4f} nats a byte at the first step")
        print(f"  validation loss  {min(val_loss.values()):.4f} nats a byte at the end, on text that was held out")
        print(f"  throughput       {speed:,.0f} tokens/s (median step)")
        print(f"  checkpoint       {run_dir / 'best.ckpt'}")
        print(*memory[strategy], sep="\n")
    draw(memory, args)
    if args.compare:
        print(f"\nlargest difference between the training losses of {' and '.join(strategies)}:")
        for num_steps in sorted({min(50, args.steps), args.steps}):
            difference = max(abs(losses[0][step] - losses[1][step]) for step in range(num_steps))
            print(f"  {difference:.1e} in the first {num_steps} steps")
        if difference:
            print("It comes from clipping: the norm is summed by shards under one, by parameters under the other, and")
            print("jumps of the loss enlarge it. With gradient_clip_val=None two ranks have equal losses, to the bit.")

    model = GPT.load_from_checkpoint(args.out / args.strategy / "best.ckpt", map_location="cpu").eval()
    print("\nsample:" + model.generate(b"\n\nThe ", 300).decode(errors="replace"))
    print(f"\npicture: {args.out / 'loss.png'}")
    print("the one line to change in your own Lightning project:")
    print('  -trainer = Trainer(strategy="ddp", ...)\n  +trainer = Trainer(strategy="megatron_ddp", ...)')


def read_text(path: Path | None) -> bytes:
    """The file's bytes; without one, the reference text behind ``help("with")``, which ships with CPython."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    if path.exists() and not path.is_file():  # a pipe would not do either: every rank reads the text
        raise OSError(None, "is a directory" if path.is_dir() else "is not a regular file")
    return path.read_bytes()


def parse_args() -> tuple[argparse.Namespace, bytes]:
    """The arguments and the text. What is wrong with them is said here, before any other process starts."""

    def positive(value: str) -> int:
        if int(value) < 1:
            raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
        return int(value)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--data", type=Path, metavar="FILE", help="a text; None is the reference text of CPython")
    parser.add_argument("--strategy", default="megatron_ddp", choices=["megatron_ddp", "ddp"])
    parser.add_argument("--compare", action="store_true", help="train under the other strategy too, and compare")
    parser.add_argument("--devices", type=positive, default=2, help="processes")
    parser.add_argument("--steps", type=positive, default=700, help="optimizer steps")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows a rank a step")
    parser.add_argument("--context", type=positive, default=128, help="bytes the model sees")
    parser.add_argument("--width", type=positive, default=128, help=f"a multiple of {HEAD_WIDTH}")
    parser.add_argument("--depth", type=positive, default=4, help="blocks")
    parser.add_argument("--seed", type=int, default=1, help="of weights and windows")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), metavar="DIR", help="where to write")
    args = parser.parse_args()

    def refuse(reason: str) -> NoReturn:
        parser.exit(2, f"{parser.prog}: error: {reason}\n")

    if args.width % HEAD_WIDTH:
        refuse(f"--width {args.width}: expected a multiple of {HEAD_WIDTH}, the width of an attention head")
    source = f"--data {args.data or 'pydoc_data.topics'}"
    needed = 2 * (args.context + 1)
    expected = f"expected a text of at least {needed} bytes, two windows of --context {args.context} + 1"
    try:
        text = read_text(args.data)
    except (OSError, ImportError) as error:
        refuse(f"{source}: {getattr(error, 'strerror', None) or error}; {expected}")
    if len(text) < needed:
        refuse(f"{source}: {f'has only {len(text)} bytes' if text else 'is empty'}; {expected}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out {args.out}: {error.strerror or error}; expected a directory, or a place where one can be made")
    return args, text


def main() -> None:
    args, text = parse_args()
    # Said by Lightning 2.6 about its own use of torch 2.13, and about num_workers=0, which is deliberate here.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")
    strategies = [args.strategy]
    if args.compare:
        strategies.append("ddp" if args.strategy == "megatron_ddp" else "megatron_ddp")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    report({strategy: train(strategy, tokens, args) for strategy in strategies}, args)


if __name__ == "__main__":
    main()
