"""Measures what replicas cost: in a step without a failure, after a kill, and when the killed one comes back.

    python -m benchmarks.replicas

Steps of two replicas of one rank each take turns, in the same two processes, with those of one world of two ranks that
all-reduces its gradients: the same bytes are sent, and each rank steps all parameters. In a second part one of two
processes is killed in the middle of its backward, again and again, and started anew.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import multiprocessing
import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import megastrategy
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Replicas
from megastrategy._replicas import start_lighthouse
from megastrategy.core import Collectives, SingleRankCollectives

from .cases import gpt, next_token_loss
from .in_turns import Step, time_in_turns
from .processes import Rank, loopback_places, run_ranks
from .results import Spread, write_json

_HEARTBEAT_S, _SKEW_S = 1.0, 30.0
_CONTEXT = 128
_ALONE_S = 2.0
"""Seconds after a kill until the killed one is started again."""
_TOGETHER = 10
"""Steps of a replica that was started again until it is killed."""


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


CASES: Mapping[str, Case] = {"200 ms": Case(256, 4, 6), "50 ms": Case(256, 4, 1), "2 ms": Case(16, 1, 1)}


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
        if replicas is not None:
            replicas.begin_batch()
        optimizer.zero_grad()
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _in_replicas(case: Case, slot: int, lighthouse: str, timers: Timers) -> Step:
    replicas = Replicas(2, slot, lighthouse=lighthouse, heartbeat_s=5.0, skew_s=120.0, host="localhost")
    train = _trained(case, SingleRankCollectives(), replicas, use_distributed_optimizer=False)
    owners: dict[str, tuple[Any, str]] = {
        "meeting": (replicas, "begin_batch"),
        "exchange": (replicas, "exchange"),
        "vote": (replicas, "vote"),
        "sums, under backward": (replicas.link, "mean_"),
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
    measured["calls"]["copy of the sums"] = dataclasses.asdict(
        _copies(sum(p.numel() for p in case.build().parameters()))
    )
    return measured


def _copies(numel: int) -> Spread:
    """Milliseconds of the copy of a replica's sums, which is made under backward."""
    sums, kept, found = torch.ones(numel), torch.ones(numel), []
    for _ in range(20):
        start_s = time.perf_counter()
        kept.copy_(sums)
        found.append(1e3 * (time.perf_counter() - start_s))
    return Spread.of(found)


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


# --- kills -----------------------------------------------------------------------------------------------------------


def _replica(case: Case, slot: int, lighthouse: str, is_killed: bool, connection: Connection) -> None:
    """Trains until a word comes, or until it kills itself in the middle of its backward. Sends the end of each step."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[slot % len(cores)]})
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")  # of torch, about the state that it receives
    replicas = Replicas(2, slot, lighthouse=lighthouse, heartbeat_s=_HEARTBEAT_S, skew_s=_SKEW_S, host="localhost")
    module = case.build()
    model = DistributedDataParallel(module, collectives=SingleRankCollectives(), replicas=replicas)
    optimizer = DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=1e-4), model)
    num_together = 0

    def maybe_die(grad: Tensor) -> None:
        if num_together == _TOGETHER:
            connection.send(("killed", time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    if is_killed:
        list(module.parameters())[len(list(module.parameters())) // 2].register_hook(maybe_die)
    for batch in replicas.batches(_endless(case.batches(slot, 8))):
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        optimizer.step()
        num_together += len(replicas.members) == 2
        connection.send(("stepped", (time.monotonic(), replicas.members)))
        if connection.poll():
            replicas.stop()
    replicas.close()


def _endless(batches: Tensor) -> Iterator[Tensor]:
    while True:
        yield from batches


class _Process:
    """One replica's process, and a connection to it."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_replica, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def received(self) -> Iterator[tuple[str, Any]]:
        """Yields the words that are there."""
        try:
            while self.connection.poll():
                yield self.connection.recv()
        except (EOFError, ConnectionResetError):
            pass

    def end(self) -> None:
        """Ends it, if it still runs."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def measure_kills(name: str, num_kills: int, say: Callable[[str], None]) -> tuple[list[float], list[Any]]:
    """Returns the moments of all kills, and the survivor's steps: the moment of its end, and the replicas in it."""
    case, killed, steps = CASES[name], list[float](), list[Any]()
    server = start_lighthouse("[::]:0", heartbeat_s=_HEARTBEAT_S, skew_s=_SKEW_S)
    address = f"http://localhost:{server.address().rpartition(':')[2]}"
    survivor, other = (_Process(case, slot, address, slot == 1) for slot in (0, 1))
    try:
        while len(killed) < num_kills:
            steps += [what for _, what in survivor.received()]
            moments = [what for word, what in other.received() if word == "killed"]
            if moments:
                killed += moments
                say(f"kill {len(killed)} of {num_kills}")
                other.end()
                time.sleep(_ALONE_S)
                steps += [what for _, what in survivor.received()]
                other = _Process(case, 1, address, True)
            wait([survivor.connection, other.connection], 1.0)
        deadline = time.monotonic() + _SKEW_S
        while time.monotonic() < deadline and len(steps[-1][1]) < 2:  # the last one comes back, too
            time.sleep(0.1)
            steps += [what for _, what in survivor.received()]
    finally:
        for process in (survivor, other):
            process.end()
        server.shutdown()
    return killed, steps


@dataclasses.dataclass(frozen=True)
class Outages:
    """Milliseconds.

    Attributes:
        after: from each kill to the end of the survivor's next step.
        returns: the survivor's first step with each replica that has come back.
        alone, together: ordinary steps of the survivor, alone and with the other one.
    """

    after: list[float]
    returns: list[float]
    alone: list[float]
    together: list[float]

    @classmethod
    def of(cls, killed: list[float], steps: list[Any]) -> Outages:
        """Finds them in the moments of kills, and the moments and members of the survivor's steps."""
        found = cls([1e3 * (min(end for end, _ in steps if end > moment) - moment) for moment in killed], [], [], [])
        for (before, them), (end, members) in zip(steps[_TOGETHER:], steps[_TOGETHER + 1 :], strict=False):
            lists = {(1, 1): found.alone, (2, 2): found.together, (1, 2): found.returns, (2, 1): []}
            lists[len(them), len(members)].append(1e3 * (end - before))
        return found


def _report_kills(found: Outages) -> None:
    usual = statistics.median(found.together)
    rows = {
        "from a kill to the end of the survivor's next step": found.after,
        "the same, less an ordinary step": [each - usual for each in found.after],
        "the survivor's first step with the returned one": found.returns,
        "an ordinary step, together": found.together,
        "an ordinary step, alone": found.alone,
    }
    table = Table(f"{len(found.after)} kills, heartbeat_s={_HEARTBEAT_S:g}", "ms: median (quartiles)", "largest")
    for what, samples in rows.items():
        table.add_row(what, f"{Spread.of(samples):.0f}", f"{max(samples):.0f}")
    Console().print(table)


# --- the command -----------------------------------------------------------------------------------------------------


@click.command(help="Measures what replicas cost, on this machine: two processes, each a replica.")
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, default=list(CASES), show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=60, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="In a turn.")
@click.option("--kills", type=click.IntRange(0), default=12, show_default=True, help="In steps of the first case.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/bench"), show_default=True)
def main(*, cases: tuple[str, ...], rounds: int, steps: int, kills: int, out: Path) -> None:
    """The command."""
    figures: dict[str, Any] = {"load before": os.getloadavg()}
    with Console(stderr=True).status("starting") as status:
        for name in cases:
            server = start_lighthouse("[::]:0", heartbeat_s=5.0, skew_s=120.0)
            address = f"http://localhost:{server.address().rpartition(':')[2]}"
            ranks = run_ranks(loopback_places(2), measure_steps, name, address, rounds, steps, on_word=status.update)
            server.shutdown()
            figures[name] = _report_steps(name, ranks[0])
        if kills:
            found = Outages.of(*measure_kills(cases[0], kills, status.update))
            figures["kills"] = dataclasses.asdict(found)
            _report_kills(found)
    figures |= {"torch": torch.__version__, "megastrategy": megastrategy.__version__, "load after": os.getloadavg()}
    write_json(out / "replicas.json", figures)


if __name__ == "__main__":
    main()
