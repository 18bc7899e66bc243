"""Measures what is paid once, and a look for signals, five a second. In turns, in the same processes.

Paid once: a fit of one step, under "ddp" and "megatron_ddp", and the optimizer's state of thousands of parameters on
its way into a checkpoint.

    python -m benchmarks.once --help
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import megastrategy
from megastrategy._lightning import shared_signals

from .measure import order_of_round
from .processes import Rank, loopback_places, run_shown
from .results import Spread, write_json
from .trainer_overhead import make_trainers_find


@dataclasses.dataclass(frozen=True)
class Turn:
    """``run`` is timed, ``prepare`` before it is not."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one turn, on one rank."""

    wall_ms: float
    cpu_ms: float


class _Many(nn.Module):
    """Matrices of 64 elements: nothing but their number costs anything."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.ones(8, 8)) for _ in range(num_params)])

    def forward(self) -> Tensor:
        return torch.stack([matrix.sum() for matrix in self.matrices]).sum()


class _Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit(strategy: str) -> None:
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Small(), torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=4))


def _fits(rank: Rank) -> dict[str, Turn]:
    make_trainers_find(rank)
    return {f'fit of one step, "{name}"': Turn(functools.partial(_fit, name)) for name in ("ddp", "megatron_ddp")}


def _looks() -> dict[str, Turn]:
    signals = shared_signals.SharedSignals()
    shared_signals.INTERVAL_S = 0.0  # no poll is left out

    def look() -> None:
        for _ in range(1000):
            signals.poll(0)

    return {"a thousand looks for a signal": Turn(look)}


def _saves(rank: Rank, num_params: int) -> dict[str, Turn]:
    """Ways to have the whole state of AdamW on rank 0, in tensors that the next step does not change."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own use of torch.jit when imported

    replicated, zero, sharded = _Many(num_params), _Many(num_params), _Many(num_params)
    adamw = torch.optim.AdamW(replicated.parameters())
    partitioned = ZeroRedundancyOptimizer(zero.parameters(), torch.optim.AdamW)
    model = megastrategy.DistributedDataParallel(sharded)
    ours = megastrategy.DistributedOptimizer(torch.optim.AdamW(sharded.parameters()), model)

    def step(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        wrapped().backward()
        optimizer.step()

    def consolidate() -> None:
        partitioned.consolidate_state_dict()
        if rank.number == 0:
            partitioned.state_dict()

    def clone_all() -> list[Tensor]:
        states = adamw.state_dict()["state"].values()
        return [value.clone() for state in states for value in state.values()]

    step_ddp = functools.partial(step, TorchDDP(replicated), adamw)
    return {
        "torch DDP's state, each tensor cloned": Turn(clone_all, step_ddp),
        "torch DDP's state, copy.deepcopy": Turn(lambda: copy.deepcopy(adamw.state_dict()), step_ddp),
        "torch DDP's state, torch.save": Turn(lambda: torch.save(adamw.state_dict(), io.BytesIO()), step_ddp),
        "ZeroRedundancyOptimizer's, consolidated": Turn(
            consolidate, functools.partial(step, TorchDDP(zero), partitioned)
        ),
        "ours, optimizer.state_dict()": Turn(ours.state_dict, functools.partial(step, model, ours)),
    }


def time_in_turns(rank: Rank, num_params: int, num_rounds: int) -> dict[str, list[Cost]]:
    """This rank's costs by name; what happens for the first time in a process is left out."""
    costs: dict[str, list[Cost]] = {}
    turns = _saves(rank, num_params) | _fits(rank) | _looks()
    for number in range(-1, num_rounds):
        for name in order_of_round(list(turns), max(number, 0)):
            rank.say(f"round {number + 1} of {num_rounds}: {name}")
            turns[name].prepare()
            gc.collect()  # what others left, not in this one's time
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            turns[name].run()
            cost = Cost(1e3 * (time.perf_counter() - start_s), 1e3 * (time.process_time() - start_cpu_s))
            if number >= 0:
                costs.setdefault(name, []).append(cost)
    return costs


@click.command(help="Measures a fit of one step, and how the state of many parameters comes together on rank 0.")
@click.option("--params", type=click.IntRange(1), default=6000, show_default=True, help="Of 64 elements each.")
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/bench"), show_default=True)
def main(*, params: int, ranks: int, rounds: int, out: Path) -> None:
    """The command."""
    results = run_shown(loopback_places(ranks), time_in_turns, params, rounds)
    table = Table("", "rank 0, ms", "processor time, ms", "the last rank, ms")  # rank 0 holds the store
    figures: dict[str, dict[str, Any]] = {}
    for name, costs in results[0].items():
        spreads = {field: Spread.of([getattr(cost, field) for cost in costs]) for field in ("wall_ms", "cpu_ms")}
        spreads["last_rank_wall_ms"] = Spread.of([cost.wall_ms for cost in results[-1][name]])
        figures[name] = {field: dataclasses.asdict(spread) for field, spread in spreads.items()}
        table.add_row(name, *(f"{spread:.0f}" for spread in spreads.values()))
    Console().print(table)
    versions = {"torch": torch.__version__, "lightning": pl.__version__, "megastrategy": megastrategy.__version__}
    content = {"params": params, "ranks": ranks, "rounds": rounds, "versions": versions, "costs": figures}
    write_json(out / "once.json", content)


if __name__ == "__main__":
    main()
