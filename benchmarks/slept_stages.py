"""``python -m benchmarks.slept_stages``: planned pipelines beside the engine's own, on cards of different speed.

Each layer sleeps, forward and backward, for as long as its operations take on the card of its stage, so that stages are
as unequal as the cards are, on any machine, however busy. What is compared is the schedule and the planner's choice. Of
the orders of the cards and the partitions of the layers some are drawn, the planner's own choice among them; each is
planned and measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import megastrategy
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Pipeline
from megastrategy.tools.plan.cards import Card
from megastrategy.tools.plan.layers import measure_layers
from megastrategy.tools.plan.stage_memory import Layer

from .processes import Rank, loopback_places, run_ranks

_WIDTH, _MICROBATCH, _STEPS = 32, 8, 4
_HIDDEN = (48, 32, 64, 96, 64, 32, 128, 64, 96, 48)
_FROZEN = {"nothing": (), "prefix": (0, 1, 2), "middle": (3, 4, 5)}
_SHORTEST_MS = 4.0
"""The forward of the smallest layer on the fastest card: sleeping is exact to a tenth of a millisecond or two."""
_SPEEDS = {"fast": 3.0, "medium": 2.0, "slow": 1.0}


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The cards of the stages, in order, and how many layers each has."""

    cards: tuple[Card, ...]
    split: tuple[int, ...]


class _SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class _Slept(nn.Module):
    """A layer that takes as long as it would on a card."""

    def __init__(self, layer: nn.Module, measured: Layer, card: Card) -> None:
        super().__init__()
        self.layer = layer
        self._forward_s, self._backward_s = measured.forward_flops / card.flops, measured.backward_flops / card.flops

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward_s)
        slept: Tensor = _SleepsInBackward.apply(self.layer(x), self._backward_s)
        return slept


def layers(frozen: Sequence[int]) -> list[nn.Module]:
    """Layers of different sizes."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(_WIDTH, h), nn.ReLU(), nn.Linear(h, _WIDTH)) for h in _HIDDEN]
    for number in frozen:
        made[number].requires_grad_(False)
    return list(made)


def time_steps(rank: Rank, cuts: Sequence[_Cut], frozen: Sequence[int], schedule: str, m: int) -> list[list[float]]:
    """The milliseconds of each step, by cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pp", "dp"))
    x = torch.randn(m * _MICROBATCH, _WIDTH)
    found = []
    for number, cut in enumerate(cuts):
        rank.say(f"cut {number + 1} of {len(cuts)}")
        made = layers(frozen)
        measured = measure_layers(made, x[:_MICROBATCH])
        of_layer = [card for card, count in zip(cut.cards, cut.split, strict=True) for _ in range(count)]
        slept = [_Slept(*each) for each in zip(made, measured, of_layer, strict=True)]
        net = Pipeline(
            slept, cut.split, loss=nn.functional.mse_loss, microbatches=m, schedule=schedule, mesh=mesh["pp"]
        )
        model = DistributedDataParallel(net, DistributedDataParallelConfig(), process_group=mesh.get_group("dp"))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        times = []
        for _ in range(_STEPS + 1):
            dist.barrier()
            start_s = time.perf_counter()
            model(x, target=x).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(1e3 * (time.perf_counter() - start_s))
        model.close()
        found.append(times[1:])  # in the first torch's stages learn shapes
    return found


def draw(chosen: _Cut, number: int) -> list[_Cut]:
    """The planner's choice and others, each once."""
    cards, every = chosen.cards, []
    for order in set(itertools.permutations(cards)):
        for cuts in itertools.combinations(range(1, len(_HIDDEN)), len(cards) - 1):
            split = tuple(b - a for a, b in itertools.pairwise([0, *cuts, len(_HIDDEN)]))
            every.append(_Cut(order, split))
    every.sort(key=lambda cut: ([card.name for card in cut.cards], cut.split))
    every.remove(chosen)
    return [chosen, *random.Random(0).sample(every, number - 1)]


@click.command(help=__doc__)
@click.option("--microbatches", default=6, show_default=True)
@click.option("--schedule", default="1F1B", show_default=True, type=click.Choice(["1F1B", "GPipe"]))
@click.option("--frozen", default="nothing", show_default=True, type=click.Choice(list(_FROZEN)))
@click.option("--cuts", default=20, show_default=True, help="How many are drawn.")
def slept_stages(microbatches: int, schedule: str, frozen: str, cuts: int) -> None:
    """The command."""
    numbers, sample = _FROZEN[frozen], torch.randn(_MICROBATCH, _WIDTH)
    smallest = min(layer.forward_flops for layer in measure_layers(layers(numbers), sample))
    unit = smallest / (1e-3 * _SHORTEST_MS) / max(_SPEEDS.values())
    cards = {name: Card(name, 10**9, speed * unit) for name, speed in _SPEEDS.items()}

    def planned(split: Sequence[int] | None, order: Sequence[Card]) -> Any:
        return megastrategy.plan(
            layers(numbers),
            sample,
            devices=order,
            microbatches=microbatches,
            schedule="1f1b" if schedule == "1F1B" else "gpipe",
            split_spec=split,
        )

    plan = planned(None, list(cards.values()))
    every = draw(_Cut(tuple(cards[name] for name in plan.stage_order), plan.split_spec), cuts)
    by_rank = run_ranks(loopback_places(len(cards)), time_steps, every, numbers, schedule, microbatches)
    rows = []
    for number, cut in enumerate(every):
        # What else a machine does only makes steps longer.
        measured_ms = min(map(max, zip(*(times[number] for times in by_rank), strict=True)))
        rows.append((measured_ms, planned(cut.split, cut.cards).step_time, cut))
    click.echo(
        f"{schedule}, {microbatches} microbatches, frozen: {frozen}\n\n| cards | layers | planned | measured | |"
    )
    click.echo("|---|---|---|---|---|")
    for measured_ms, planned_ms, cut in sorted(rows, key=lambda row: row[0]):
        mark = " (the planner's)" if cut == every[0] else ""
        names, split = " ".join(card.name for card in cut.cards), "-".join(map(str, cut.split))
        error = planned_ms / measured_ms - 1
        click.echo(f"| {names} | {split}{mark} | {planned_ms:.0f} ms | {measured_ms:.0f} ms | {error:+.1%} |")
    errors = [abs(planned_ms / measured_ms - 1) for measured_ms, planned_ms, _ in rows]
    place = sorted(measured_ms for measured_ms, _, _ in rows).index(rows[0][0]) + 1
    click.echo(f"\nthe planner's choice is number {place} of {len(rows)}; ", nl=False)
    click.echo(f"off by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most")


if __name__ == "__main__":
    slept_stages()
