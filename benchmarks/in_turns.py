"""Engines in the same processes, which train the same and take turns: their step times, and ratios to one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .measure import order_of_round
from .network import INTERFACE, check_rate, shaped_network
from .processes import Rank, loopback_places, namespace_places, run_shown
from .results import Spread, write_json

Step = Callable[[Tensor], Tensor]
"""One step with a batch; returns the loss."""

_TOLERANCE = 1e-4
"""Relative, of the losses of all engines: they sum in other orders."""


def time_in_turns(rank: Rank, engines: Mapping[str, Step], batches: Tensor, num_rounds: int) -> dict[str, Any]:
    """Milliseconds a step by engine and round, of the slowest rank, and each engine's last loss. The first batch warms
    an engine up in each of its turns."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    losses: dict[str, float] = {}
    for number in range(num_rounds):
        for name in order_of_round(list(engines), number):
            rank.say(f"round {number + 1} of {num_rounds}: {name}")
            engines[name](batches[0])
            dist.barrier()
            start = time.perf_counter()
            for batch in batches[1:]:
                loss = engines[name](batch)
            spent = torch.tensor((time.perf_counter() - start) / (len(batches) - 1) * 1000.0, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name].append(spent.item())
            losses[name] = float(loss)
    return {"times": times, "losses": losses}


def adamw(params: Any) -> torch.optim.Optimizer:
    """The optimizer of all engines. torch's ``foreach`` refuses DTensors of two meshes, and beside Parameters."""
    return torch.optim.AdamW(params, lr=1e-4, foreach=False)


def trained(model: nn.Module, optimizer: Any) -> Step:
    """A step of a model that returns its loss."""

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(tokens)
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return step


def turns(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a command that calls :func:`run_in_turns`."""
    for option in (
        click.option(
            "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/bench"), show_default=True
        ),
        click.option(
            "--network", help="The rate of the link between the two machines, as tc takes it: 1gbit. Needs root."
        ),
        click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="In a turn."),
        click.option("--rounds", type=click.IntRange(2), default=7, show_default=True),
    ):
        command = option(command)
    return command


def run_in_turns(
    measure: Callable[[Rank, int, int], dict[str, Any]],
    baseline: str,
    file: str,
    *,
    rounds: int,
    steps: int,
    network: str | None,
    out: Path,
) -> None:
    """Runs ``measure`` on four ranks, with a network the first two of one machine and the others of another, and
    reports what it returns."""
    with contextlib.ExitStack() as stack:
        places = loopback_places(4)
        if network is not None:
            machines, address = stack.enter_context(shaped_network(2, check_rate(network)))
            places = namespace_places([machine for machine in machines for _ in range(2)], INTERFACE, address)
        ranks = run_shown(places, measure, rounds, steps)
    report(ranks[0], baseline, {"rounds": rounds, "steps": steps, "network": network}, out / file)


def report(measured: Mapping[str, Any], baseline: str, settings: Mapping[str, Any], path: Path) -> None:
    """Prints a table, and writes it with what it was measured with as JSON.

    Raises:
        SystemExit: if the engines did not train the same.
    """
    times, losses = measured["times"], measured["losses"]
    for name, loss in losses.items():
        if abs(loss - losses[baseline]) > _TOLERANCE * abs(losses[baseline]):
            raise SystemExit(f"{name} trained to a loss of {loss}, and {baseline} to {losses[baseline]}")
    table = Table("engine", "ms a step", f"ratio to {baseline}")
    figures = {}
    for name, samples in times.items():
        ratios = Spread.of([mine / theirs for mine, theirs in zip(samples, times[baseline], strict=True)])
        spread = Spread.of(samples)
        figures[name] = {"step_ms": dataclasses.asdict(spread), "ratio": dataclasses.asdict(ratios)}
        table.add_row(name, f"{spread:.0f}", f"{ratios:.2f}")
    Console().print(table)
    write_json(path, {**settings, "torch": torch.__version__, "losses": losses, **figures})
