"""``python -m benchmarks.predictions``: a step's time as it is simulated from one profile, beside the measured one.

One profile is taken on two ranks behind links of ``--profiled-at``, with the default options. From it alone the step
is simulated at other rates, on other numbers of ranks, with several microbatches and bucket sizes. Each is then
measured: bucket sizes in turns, with a rank a core, and ranks that share cores where there are more of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from megastrategy import DistributedDataParallelConfig
from megastrategy.core import DistributedDataParallel
from megastrategy.tools.plan.recorded_work import Measured, measure
from megastrategy.tools.plan.simulator import Processor
from megastrategy.tools.plan.steps import Network, simulate_step
from megastrategy.tools.profiling import Recorder
from megastrategy.tools.timeline import ModelEvents, RankEvents

from .cases import CASES
from .commit import current_commit
from .engines import ENGINES, ours
from .measure import train_step
from .network import INTERFACE, shaped_network
from .processes import Rank, namespace_places, run_ranks

_SKIP = 3
_SHARE = 0.25
"""The profile's parts are those that a quarter of its steps are faster than, as the measured steps are."""
_CASES = {1: "gpt-14m", 4: "gpt-14m-accumulate-4"}
"""By microbatches."""


def record(rank: Rank, case_name: str, num_steps: int) -> RankEvents:
    """Trains with the default options, and returns what a profile would."""
    case, events = CASES[case_name], []

    def done() -> None:
        events.append(None)

    recorder = Recorder(_SKIP, num_steps, done)
    engine = ENGINES["ours"].build(case, "adamw", recorder)
    assert isinstance(engine.model, DistributedDataParallel)
    recorder.follow(engine.model)
    batches = case.batches(rank.number)
    number = 0
    while not events:
        train_step(engine, batches[number % len(batches)])
        number += 1
    model: ModelEvents = recorder.take()
    engine.close()
    return RankEvents(rank.number, [model])


def mbit_of(rate: str) -> float:
    """Reads what tc understands as a rate, in Mbit/s."""
    factor = {"k": 1e-3, "m": 1.0, "g": 1e3}[rate[-4]]
    return float(rate[:-4]) * factor


def predict(measured: Measured, scale: float, num_ranks: int, accumulate: int, bucket_size: int | None) -> float:
    """The simulated step, in milliseconds, behind links of ``scale`` times the profile's rate."""
    assert measured.link is not None, "gloo tells when it sent"
    link = dataclasses.replace(measured.link, bytes_per_ms=measured.link.bytes_per_ms * scale)
    work = dataclasses.replace(measured.work, num_microbatches=accumulate)
    cores = min(1.0, len(os.sched_getaffinity(0)) / num_ranks)
    processor = Processor(cores, measured.processor.ms_per_byte)
    config = DistributedDataParallelConfig(bucket_size=bucket_size)
    return simulate_step(work, config, num_ranks, Network(link), processor).step_ms


def time_steps(rank: Rank, case_name: str, sizes: Sequence[int | None], rounds: int, steps: int) -> list[list[float]]:
    """The milliseconds of each step, by bucket size; sizes take turns."""
    case = CASES[case_name]
    batches = case.batches(rank.number)
    engines = [ours(f"size {size}", "", bucket_size=size).build(case, "adamw") for size in sizes]
    found: list[list[float]] = [[] for _ in sizes]
    for number in range(rounds + 1):
        for place, engine in enumerate(engines):
            dist.barrier()
            for step in range(steps + 1):
                start_s = time.perf_counter()
                train_step(engine, batches[step % len(batches)])
                # The first round warms up, and a turn's first step meets what is cold.
                if number and step:
                    found[place].append(1e3 * (time.perf_counter() - start_s))
    dist.barrier()
    for engine in engines:
        engine.close()
    return found


def measure_steps(
    rate: str, num_ranks: int, accumulate: int, sizes: Sequence[int | None], rounds: int, steps: int
) -> dict[int | None, list[float]]:
    """The slowest rank's milliseconds of each step, by bucket size."""
    with shaped_network(num_ranks, rate) as (namespaces, address):
        places = namespace_places(namespaces, INTERFACE, address)
        by_rank = run_ranks(places, time_steps, _CASES[accumulate], sizes, rounds, steps)
    return {size: [max(each) for each in zip(*(r[n] for r in by_rank), strict=True)] for n, size in enumerate(sizes)}


def take_profile(rate: str, num_steps: int) -> list[RankEvents]:
    """One profile on two ranks."""
    with shaped_network(2, rate) as (namespaces, address):
        return run_ranks(namespace_places(namespaces, INTERFACE, address), record, "gpt-14m", num_steps)


def _sizes(_: click.Context, __: click.Parameter, text: str) -> list[int | None]:
    return [None if part == "default" else int(part) for part in text.split(",")]


def _numbers(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@click.command(help=__doc__)
@click.option("--profiled-at", default="1gbit", show_default=True)
@click.option("--rates", default="500mbit,1gbit,2gbit,10gbit", show_default=True)
@click.option("--ranks", default="2,4", show_default=True, callback=_numbers)
@click.option("--accumulate", default="1,4", show_default=True, callback=_numbers)
@click.option("--sizes", default="default,1000000,7000000", show_default=True, callback=_sizes)
@click.option("--rounds", default=3, show_default=True)
@click.option("--steps", default=3, show_default=True)
@click.option("--reuse", type=click.Path(exists=True, path_type=Path), help="A profile that an earlier run left.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/predictions"), show_default=True)
def predictions(
    profiled_at: str,
    rates: str,
    ranks: list[int],
    accumulate: list[int],
    sizes: list[int | None],
    rounds: int,
    steps: int,
    reuse: Path | None,
    out: Path,
) -> None:
    """The command."""
    out.mkdir(parents=True, exist_ok=True)
    kept = reuse or out / "profile.json"
    if reuse is None:
        kept.write_text(json.dumps([rank.to_json() for rank in take_profile(profiled_at, 10)]))
    measured = measure([RankEvents.from_json(rank) for rank in json.loads(kept.read_text())], _SHARE)
    click.echo(f"{measured.link} {measured.processor}")
    work = {k: v for k, v in dataclasses.asdict(measured.work).items() if k not in ("params", "ready")}
    click.echo(f"profiled {measured.step_ms:.1f} ms, simulated {measured.simulated_ms:.1f}; {work}")
    click.echo(f"{datetime.date.today()}, torch {torch.__version__}, commit {current_commit()}")
    rows: list[dict[str, Any]] = []
    for num_ranks in ranks:
        for rate in rates.split(","):
            for number in accumulate:
                found = measure_steps(rate, num_ranks, number, sizes, rounds, max(1, steps // number))
                for size, samples in found.items():
                    scale = mbit_of(rate) / mbit_of(profiled_at)
                    predicted = predict(measured, scale, num_ranks, number, size)
                    row = {"ranks": num_ranks, "rate": rate, "accumulate": number, "bucket_size": size}
                    row |= {"predicted_ms": predicted, "measured_ms": least(samples), "samples": samples}
                    rows.append(row | {"error": predicted / least(samples) - 1})
                    click.echo(_line(rows[-1]))
                with (out / "rows.jsonl").open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows[-len(found) :])
    errors = [abs(row["error"]) for row in rows]
    click.echo(f"{len(errors)} cases: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")


def least(samples: Sequence[float]) -> float:
    """The mean of the fastest quarter: what else a machine does only makes steps longer."""
    fastest = sorted(samples)[: max(1, len(samples) // 4)]
    return statistics.fmean(fastest)


def _line(row: dict[str, Any]) -> str:
    size = "default" if row["bucket_size"] is None else f"{row['bucket_size']:,}"
    spread = f"{min(row['samples']):.0f} to {max(row['samples']):.0f}, median {statistics.median(row['samples']):.0f}"
    return (
        f"| {row['ranks']} | {row['rate']} | {row['accumulate']} | {size} | {row['predicted_ms']:.0f} | "
        f"{row['measured_ms']:.0f} ({spread}) | {row['error']:+.1%} |"
    )


if __name__ == "__main__":
    predictions()
