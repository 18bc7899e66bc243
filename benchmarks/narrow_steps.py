"""Times the optimizer's step where its state or main params are kept otherwise, in turns with a step without.

python -m benchmarks.narrow_steps --help
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import megastrategy
from megastrategy.core import memory_use

from .measure import order_of_round
from .processes import Rank, loopback_places, run_shown

PLAIN = "fp32"
WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        PLAIN: MappingProxyType({}),
        "bf16 state": MappingProxyType({"optimizer_state_dtype": "bf16"}),
        "param remainders": MappingProxyType({"store_param_remainders": True}),
        "both": MappingProxyType({"optimizer_state_dtype": "bf16", "store_param_remainders": True}),
        "offloaded": MappingProxyType({"offload_optimizer_states": True}),
    }
)
_LAYERS = 12


def measure(rank: Rank, kind: str, width: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Milliseconds of processor time of the thread that steps, by way and round, the most of all ranks; and the bytes
    of main params and state. bf16 weights; gradients are there already, and gathers follow the step."""
    runs = {}
    for name, options in WAYS.items():
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS))).bfloat16()
        config = megastrategy.DistributedDataParallelConfig(overlap_param_gather=False, **options)
        model = megastrategy.DistributedDataParallel(module, config)
        implementation = {"foreach": {"foreach": True}, "fused": {"fused": True}, "single": {}}[kind]
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, **implementation)
        runs[name] = model, megastrategy.DistributedOptimizer(optimizer, model)
        model(torch.ones(1, width, dtype=torch.bfloat16)).sum().backward()
        runs[name][1].step()
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):
        for name in order_of_round(list(WAYS), number):
            rank.say(f"round {number} of {rounds}: {name}")
            dist.barrier()
            begun_ns = time.thread_time_ns()
            runs[name][1].step()
            spent = torch.tensor((time.thread_time_ns() - begun_ns) / 1e6, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if number > 0:  # the first makes what later ones have
                times[name].append(spent.item())
    held = {name: memory_use(model.layout, rank.number, 2).state_bytes for name, (model, _) in runs.items()}
    return times, held


@click.command(help="Times steps of AdamW on bf16 weights with narrow state and main params, on two ranks.")
@click.option("--kind", type=click.Choice(["single", "foreach", "fused"]), default="single", show_default=True)
@click.option("--width", type=click.IntRange(8), default=1024, show_default=True, help=f"Of {_LAYERS} layers.")
@click.option("--rounds", type=click.IntRange(2), default=9, show_default=True)
def main(*, kind: str, width: int, rounds: int) -> None:
    """The command."""
    times, held = run_shown(loopback_places(2), measure, kind, width, rounds)[0]
    numel = _LAYERS * (width * width + width)
    table = Table("", "main params and state, bytes a parameter a rank", "step, ms of processor time", "ratio to fp32")
    for name, of_way in times.items():
        ratios = [mine / plain for mine, plain in zip(of_way, times[PLAIN], strict=True)]
        table.add_row(name, f"{held[name] / numel:.3f}", _quartiles(of_way, ".1f"), _quartiles(ratios, ".2f"))
    Console(width=120).print(table)


def _quartiles(values: list[float], form: str) -> str:
    lower, middle, upper = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({lower:{form}} to {upper:{form}})"


if __name__ == "__main__":
    main()
