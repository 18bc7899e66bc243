"""Measures what replicas cost in a step without a failure.

    python -m benchmarks.replicas

Steps of two replicas of one rank each take turns, in the same two processes, with those of one world of two ranks that
all-reduces its gradients: the same bytes are sent, and each rank steps all parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
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
from torchft.coordination import LighthouseServer

import megastrategy
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Replicas
from megastrategy.core import Collectives, SingleRankCollectives

from .cases import gpt, next_token_loss
from .in_turns import Step, time_in_turns
from .processes import Rank, loopback_places, run_ranks
from .results import Spread, write_json

_CONTEXT = 128


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the number of sequences in a batch, chosen for a step of about so many milliseconds on one core."""

    width: int
    depth: int
    sequences: int

    def build(self) -> nn.Module:
        """Returns the model, with the same weights on each rank."""
        torch.manual_seed(0)
        return gpt(256, _CONTEXT, self.width, self.depth)

    def batches(self, seed: int, num: int) -> Tensor:
        """Returns (step, sequence, context + 1) tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(256, (num, self.sequences, _CONTEXT + 1), generator=generator)


CASES: Mapping[str, Case] = {"250 ms": Case(256, 4, 6), "50 ms": Case(256, 4, 1), "2 ms": Case(16, 1, 1)}


# --- steps in which nothing fails ------------------------------------------------------------------------------------


class Timers:
    """Milliseconds of calls, by name, which are summed over a step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the call with a timer."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                step = self.steps[-1]
                step[name] = step.get(name, 0.0) + 1e3 * (time.perf_counter() - start_s)

        return timed

    def of_steps(self, step: Step) -> Step:
        """Returns the step, with a timer of the processor time of all threads of this process."""

        def timed(batch: Tensor) -> Tensor:
            start_s = time.process_time()
            loss = step(batch)
            self.steps.append({"processor": 1e3 * (time.process_time() - start_s)})
            return loss

        return timed

    def spreads(self) -> dict[str, Spread]:
        """The spread over steps, by name."""
        return {name: Spread.of([step[name] for step in self.steps]) for name in self.steps[-1]}


def _trained(case: Case, collectives: Collectives | None, replicas: Replicas | None, **options: Any) -> Step:
    model = DistributedDataParallel(
        case.build(), DistributedDataParallelConfig(**options), collectives=collectives, replicas=replicas
    )
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _in_replicas(case: Case, slot: int, lighthouse: str, timers: Timers) -> Step:
    groups = [dist.new_group([number]) for number in range(2)]
    replicas = Replicas(2, slot, lighthouse=lighthouse, skew_s=120.0, process_group=groups[slot])
    train = _trained(case, SingleRankCollectives(), replicas, use_distributed_optimizer=False)
    owners: dict[str, tuple[Any, str]] = {
        "quorum, asked for": (replicas, "begin"),
        "flags": (replicas, "any_of"),
        "buffers and vote": (replicas, "commit"),
        "sums, under backward": (replicas, "reduce"),
    }
    for name, (owner, method) in owners.items():
        setattr(owner, method, timers.around(name, getattr(owner, method)))

    def step(batch: Tensor) -> Tensor:
        timers.steps.append({})
        return train(batch)

    return step


def measure_steps(rank: Rank, name: str, lighthouse: str, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Times of a step by engine and round, and of the calls in a replica's step."""
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    case, timers = CASES[name], Timers()
    clocks = {"one world": Timers(), "replicas": Timers()}
    engines = {
        "one world": clocks["one world"].of_steps(_trained(case, None, None, use_distributed_optimizer=False)),
        "replicas": clocks["replicas"].of_steps(_in_replicas(case, rank.number, lighthouse, timers)),
    }
    for step in engines.values():
        step(case.batches(rank.number, 1)[0])
    for each in (timers, *clocks.values()):
        each.steps.clear()
    measured = time_in_turns(rank, engines, case.batches(rank.number, num_steps + 1), num_rounds)
    measured["processor"] = {name: dataclasses.asdict(clock.spreads()["processor"]) for name, clock in clocks.items()}
    measured["calls"] = {name: dataclasses.asdict(spread) for name, spread in timers.spreads().items()}
    return measured


def _report_steps(name: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    times, losses = measured["times"], measured["losses"]
    if abs(losses["replicas"] - losses["one world"]) > 1e-4 * abs(losses["one world"]):
        raise SystemExit(f"the two trained to different losses: {losses}")
    both = list(zip(times["replicas"], times["one world"], strict=True))
    spreads = {engine: Spread.of(samples) for engine, samples in times.items()}
    spreads["ratio"] = Spread.of([ours / theirs for ours, theirs in both])
    spreads["added ms"] = Spread.of([ours - theirs for ours, theirs in both])
    table = Table(f"a step of about {name}", "median (quartiles)")
    for what, spread in spreads.items():
        table.add_row(what, f"{spread:{'.3f' if what == 'ratio' else '.1f'}}")
    for engine, spread in measured["processor"].items():
        table.add_row(f"{engine}, processor time", f"{Spread(**spread):.1f}")
    for what, spread in measured["calls"].items():
        table.add_row(f"{what}, ms", f"{Spread(**spread):.2f}")
    Console().print(table)
    return {what: dataclasses.asdict(spread) for what, spread in spreads.items()} | {
        name: measured[name] for name in ("processor", "calls")
    }


# --- the command -----------------------------------------------------------------------------------------------------


@click.command(help="Measures what replicas cost, on this machine: two processes, each a replica.")
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, default=list(CASES), show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=60, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="In a turn.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/bench"), show_default=True)
def main(*, cases: tuple[str, ...], rounds: int, steps: int, out: Path) -> None:
    """The command."""
    figures: dict[str, Any] = {"load before": os.getloadavg()}
    with Console(stderr=True).status("starting") as status:
        for name in cases:
            timeouts = {"join_timeout_ms": 120_000, "heartbeat_timeout_ms": 5_000}
            server = LighthouseServer(bind="[::]:0", min_replicas=1, **timeouts)
            address = f"http://localhost:{server.address().rpartition(':')[2]}"
            ranks = run_ranks(loopback_places(2), measure_steps, name, address, rounds, steps, on_word=status.update)
            server.shutdown()
            figures[name] = _report_steps(name, ranks[0])
    figures |= {"torch": torch.__version__, "megastrategy": megastrategy.__version__, "load after": os.getloadavg()}
    write_json(out / "replicas.json", figures)


if __name__ == "__main__":
    main()
