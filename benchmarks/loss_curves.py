"""Trains a byte-level GPT under torch DDP and with what rounds, and says how far their losses are apart.

Training is chaotic: losses part wherever anything differs. So one more run under torch DDP is in the table, whose
weights were rounded once, before the first step: it shows what a difference means.

    python -m benchmarks.loss_curves --help
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any

import click
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import megastrategy

from .cases import gpt, next_token_loss
from .processes import Rank, loopback_places, run_shown

BASELINE, DISTURBED = "ddp", "ddp, weights rounded to bf16 at the start"
ROUNDED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "16 bits": MappingProxyType({"grad_wire_dtype": "bf16", "param_wire_dtype": "bf16"}),
        "8 bits": MappingProxyType({"grad_wire_dtype": "int8", "param_wire_dtype": "int8"}),
    }
)
_CONTEXT, _BATCH, _HELD_OUT_BYTES, _NUM_LAST = 128, 8, 2**16, 100


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run's losses, in nats a byte: of every step, the mean over ranks; and of text that was not trained on."""

    training: list[float]
    held_out: float

    @property
    def last(self) -> float:
        """The mean of the last hundred steps."""
        last = self.training[-_NUM_LAST:]
        return sum(last) / len(last)


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    return torch.stack([text[start : start + _CONTEXT + 1] for start in starts.tolist()]).long()


def _wrap(name: str, module: nn.Module) -> tuple[nn.Module, Any]:
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    if name not in ROUNDED:
        return TorchDDP(module), adamw
    config = megastrategy.DistributedDataParallelConfig(**ROUNDED[name])  # type: ignore[arg-type]
    model = megastrategy.DistributedDataParallel(module, config)
    return model, megastrategy.DistributedOptimizer(adamw, model)


def train(rank: Rank, name: str, seed: int, steps: int) -> Curve:
    """One run. The same seed gives all the same weights and the same windows."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    trained_on, held_out = text[:-_HELD_OUT_BYTES], text[-_HELD_OUT_BYTES:]
    torch.manual_seed(seed)
    module = gpt(vocabulary=256, context=_CONTEXT, width=128, depth=4)
    if name == DISTURBED:
        with torch.no_grad():
            for param in module.parameters():
                param.copy_(param.bfloat16())
    model, optimizer = _wrap(name, module)
    places = torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []
    for step in range(steps):
        starts = torch.randint(len(trained_on) - _CONTEXT, (rank.size, _BATCH), generator=places)[rank.number]
        optimizer.zero_grad()
        loss = next_token_loss(model, _windows(trained_on, starts))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 0:
            rank.say(f"{name}, seed {seed}: step {step} of {steps}")
    training = torch.stack(losses)
    torch.distributed.all_reduce(training)
    with torch.no_grad():
        every = torch.arange(0, len(held_out) - _CONTEXT, _CONTEXT)
        parts = [next_token_loss(module, _windows(held_out, part)).item() * len(part) for part in every.split(64)]
    return Curve((training / rank.size).tolist(), sum(parts) / len(every))


def _draw(curves: Mapping[str, list[Curve]], steps: int, path: Path) -> None:
    """Curves above; below, the relative difference of their running means from the baseline's."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    window = min(steps, _NUM_LAST)
    means = {
        name: [torch.tensor(curve.training).unfold(0, window, 1).mean(1) for curve in of_name]
        for name, of_name in curves.items()
    }
    for number, (name, of_name) in enumerate(means.items()):
        for seed, mean in enumerate(of_name):
            ends, label = range(window, steps + 1), name if seed == 0 else None
            above.plot(ends, mean, color=f"C{number}", linewidth=1, label=label)
            if name != BASELINE:
                below.plot(ends, 100 * (mean / means[BASELINE][seed] - 1), color=f"C{number}", linewidth=1)
    above.set(ylabel=f"loss (nats a byte), mean of {window} steps")
    above.legend()
    below.axhline(0, color="C0", linewidth=1)
    below.set(xlabel="step", ylabel="% from ddp's")
    figure.savefig(path, dpi=100)


@click.command(help="Trains a byte-level GPT under torch DDP and with what rounds, and compares their losses.")
@click.option("--only", type=click.Choice(list(ROUNDED)), multiple=True, help="Of what rounds; by default all.")
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/bench"), show_default=True)
def main(*, only: tuple[str, ...], steps: int, seeds: int, ranks: int, out: Path) -> None:
    """The command."""
    curves: dict[str, list[Curve]] = {}
    begun_s = time.perf_counter()
    for seed in range(1, seeds + 1):
        for name in (BASELINE, DISTURBED, *(only or ROUNDED)):
            curves.setdefault(name, []).append(run_shown(loopback_places(ranks), train, name, seed, steps)[0])
    table = Table(
        "", "held out, nats a byte", "% from ddp's, by seed", f"last {_NUM_LAST} steps", "% from ddp's, by seed"
    )
    for name, of_name in curves.items():
        row = [name]
        for what in ("held_out", "last"):
            values = [getattr(curve, what) for curve in of_name]
            ratios = [100 * (v / getattr(b, what) - 1) for v, b in zip(values, curves[BASELINE], strict=True)]
            row.append(f"{sum(values) / len(values):.4f}")
            row.append("" if name == BASELINE else ", ".join(f"{ratio:+.2f}" for ratio in ratios))
        table.add_row(*row)
    Console(width=120).print(table, f"{time.perf_counter() - begun_s:.0f} s")
    out.mkdir(parents=True, exist_ok=True)
    _draw(curves, steps, out / "loss_curves.png")
    content = {name: [dataclasses.asdict(curve) for curve in of_name] for name, of_name in curves.items()}
    (out / "loss_curves.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
