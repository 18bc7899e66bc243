"""Measures what a Lightning Trainer adds to a loop of one's own, under "ddp" and under "megatron_ddp".

The model and the optimizer are the same, and the turns are taken in the same processes.

    python -m benchmarks.trainer_overhead --help
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import megastrategy

from .cases import CASES, Case
from .engines import ENGINES
from .measure import order_of_round, train_step
from .processes import Rank, loopback_places, run_shown
from .results import Spread, write_json

_WARM_UP_STEPS = 5
_ENGINES = {"ddp": "ddp", "megatron_ddp": "ours"}
"""The engine that is the same without a Trainer, by strategy."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive steps: means over them, of one rank."""

    step_ms: float
    cpu_ms: float


class _Clock:
    """Started after the warm-up and stopped after the last step."""

    def __init__(self) -> None:
        self._start_s = self._start_cpu_s = 0.0

    def start(self) -> None:
        dist.barrier()
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()

    def stop(self, num_steps: int) -> Block:
        wall_s, cpu_s = time.perf_counter() - self._start_s, time.process_time() - self._start_cpu_s
        return Block(1e3 * wall_s / num_steps, 1e3 * cpu_s / num_steps)


class _Module(pl.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.build_model()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Batches:
    """Represents a list, since the Trainer takes a list for several loaders."""

    def __init__(self, batches: Tensor, num_steps: int) -> None:
        self._batches, self._num_steps = batches, num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[Tensor]:
        return (self._batches[step % len(self._batches), 0] for step in range(self._num_steps))


class _Timer(pl.Callback):
    def __init__(self, num_steps: int) -> None:
        self.clock, self.num_steps = _Clock(), num_steps
        self.block: Block | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == _WARM_UP_STEPS:
            self.clock.start()
        elif trainer.global_step == _WARM_UP_STEPS + self.num_steps:
            self.block = self.clock.stop(self.num_steps)


def _fit(strategy: str, case: Case, batches: Tensor, num_steps: int) -> Block:
    timer, total = _Timer(num_steps), _WARM_UP_STEPS + num_steps
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=total,
        callbacks=[timer],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Module(case), _Batches(batches, total))
    assert timer.block is not None, "max_steps were taken"
    return timer.block


def _loop(strategy: str, case: Case, batches: Tensor, num_steps: int) -> Block:
    engine, clock = ENGINES[_ENGINES[strategy]].build(case, "adamw"), _Clock()
    for step in range(_WARM_UP_STEPS + num_steps):
        if step == _WARM_UP_STEPS:
            clock.start()
        train_step(engine, batches[step % len(batches)])
    block = clock.stop(num_steps)
    engine.close()
    return block


def make_trainers_find(rank: Rank) -> None:
    """Trainers of this process start no processes of their own: they read what torchrun would have written."""
    warnings.simplefilter("ignore")  # the Trainer's advice on data loaders
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(
        {"TORCHELASTIC_RUN_ID": "benchmark", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(rank.size)}
        | {"RANK": str(rank.number), "LOCAL_RANK": str(rank.number), "WORLD_SIZE": str(rank.size)}
    )


def time_in_turns(rank: Rank, case: Case, num_rounds: int, num_steps: int) -> dict[str, list[Block]]:
    """This rank's blocks by name: a strategy's, and the strategy's with " loop" for the loop without a Trainer."""
    make_trainers_find(rank)
    batches = case.batches(rank.number)
    blocks: dict[str, list[Block]] = {}
    kinds: dict[str, Callable[[], Block]] = {}
    for strategy in _ENGINES:
        kinds[strategy] = lambda strategy=strategy: _fit(strategy, case, batches, num_steps)
        kinds[f"{strategy} loop"] = lambda strategy=strategy: _loop(strategy, case, batches, num_steps)
    for number in range(num_rounds):
        for name in order_of_round(list(kinds), number):
            rank.say(f"round {number + 1} of {num_rounds}: {name}")
            blocks.setdefault(name, []).append(kinds[name]())
    return blocks


def overhead(ranks: list[dict[str, list[Block]]], strategy: str, field: str) -> Spread:
    """A Trainer's step less the loop's in the same round, of the slowest rank (wall) or the mean rank (processor)."""
    over = max if field == "step_ms" else lambda values: sum(values) / len(values)
    rounds = range(len(ranks[0][strategy]))
    by_round = {
        name: [over([getattr(blocks[name][number], field) for blocks in ranks]) for number in rounds]
        for name in (strategy, f"{strategy} loop")
    }
    return Spread.of([a - b for a, b in zip(by_round[strategy], by_round[f"{strategy} loop"], strict=True)])


@click.command(help="Measures what a Lightning Trainer adds to a step, under torch DDP and under megatron_ddp.")
@click.option("--case", "name", type=click.Choice(list(CASES)), default="tiny", show_default=True)
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True, help="In a turn.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/bench"), show_default=True)
def main(*, name: str, ranks: int, rounds: int, steps: int, out: Path) -> None:
    """The command."""
    results = run_shown(loopback_places(ranks), time_in_turns, CASES[name], rounds, steps)
    table = Table("strategy", "Trainer adds, ms a step", "of it processor time, ms")
    figures: dict[str, dict[str, Any]] = {}
    for strategy in _ENGINES:
        spreads = {field: overhead(results, strategy, field) for field in ("step_ms", "cpu_ms")}
        figures[strategy] = {field: dataclasses.asdict(spread) for field, spread in spreads.items()}
        table.add_row(strategy, *(f"{spread:.2f}" for spread in spreads.values()))
    Console().print(table)
    versions = {"torch": torch.__version__, "lightning": pl.__version__, "megastrategy": megastrategy.__version__}
    content = {"case": name, "ranks": ranks, "rounds": rounds, "steps": steps, "versions": versions, **figures}
    write_json(out / "trainer_overhead.json", content)


if __name__ == "__main__":
    main()
