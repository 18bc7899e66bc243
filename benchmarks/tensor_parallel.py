"""Step times of two data-parallel times two tensor ranks: ours against torch's data parallelisms beside its TP.

    python -m benchmarks.tensor_parallel
    sudo python -m benchmarks.tensor_parallel --network 1gbit

All engines live in the same processes and take turns; the model is cut alike, by torch's ``parallelize_module``. With a
network the two ranks of a tensor group are one machine, whose link to the other machine has the rate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

from .measure import order_of_round
from .network import INTERFACE, check_rate, shaped_network
from .processes import Rank, loopback_places, namespace_places, run_ranks
from .results import Spread

_VOCABULARY, _WIDTH, _DEPTH, _TIME, _BATCH = 8192, 384, 4, 64, 2
_TOLERANCE = 1e-4
"""Relative, of the losses of all engines: they sum in other orders."""


class Block(nn.Module):
    """A pre-norm MLP over (batch, time, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 8 * _WIDTH)
        self.down = nn.Linear(8 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns as much as it is given."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks and head: 16 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(_DEPTH)])
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) tokens -> the loss of each as its own successor."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


@dataclasses.dataclass
class Engine:
    """A model that trains. ``step``: one step with a batch; the loss."""

    step: Callable[[Tensor], Tensor]


def _cut(mesh: DeviceMesh) -> Model:
    torch.manual_seed(0)
    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    model = Model()
    parallelize_module(model, mesh["tp"], styles)
    return model


def _trained(model: nn.Module, optimizer: Any) -> Engine:
    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Engine(step)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, foreach=False)  # torch's own refuses lists of Parameters and DTensors


def _ours(mesh: DeviceMesh, **options: Any) -> Engine:
    config = DistributedDataParallelConfig(**options)
    model = DistributedDataParallel(_cut(mesh), config, process_group=mesh.get_group("dp"))
    return _trained(model, DistributedOptimizer(_adamw(model.parameters()), model))


def _fsdp2(mesh: DeviceMesh) -> Engine:
    model = _cut(mesh)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    return _trained(model, _adamw(model.parameters()))


def _replicate(mesh: DeviceMesh) -> Engine:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = _cut(mesh)
    for part in (*model.blocks, model):
        replicate(part, mesh=mesh["dp"])
    return _trained(model, _adamw(model.parameters()))


_ENGINES: dict[str, Callable[[DeviceMesh], Engine]] = {
    "ours": _ours,
    "ours, param gather under forward": lambda mesh: _ours(mesh, overlap_param_gather="forward"),
    "fsdp2": _fsdp2,
    "replicate": _replicate,
}
"""``fsdp2`` does not reshard after forward; the others have their defaults but for what is named."""


def _shown(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.q1:.{digits}f} to {spread.q3:.{digits}f})"


def time_in_turns(rank: Rank, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds a step by engine and round, of the slowest rank, and each engine's last loss."""
    mesh = init_device_mesh("cpu", (rank.size // 2, 2), mesh_dim_names=("dp", "tp"))
    engines = {name: make(mesh) for name, make in _ENGINES.items()}
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    batches = torch.randint(_VOCABULARY, (num_steps + 1, _BATCH, _TIME), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in engines}
    losses: dict[str, float] = {}
    for number in range(num_rounds):
        for name in order_of_round(list(engines), number):
            rank.say(f"round {number + 1} of {num_rounds}: {name}")
            engines[name].step(batches[0])
            dist.barrier()
            start = time.perf_counter()
            for tokens in batches[1:]:
                loss = engines[name].step(tokens)
            spent = torch.tensor((time.perf_counter() - start) / num_steps * 1000.0, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name].append(spent.item())
            losses[name] = float(loss.full_tensor() if isinstance(loss, DTensor) else loss)
    return {"times": times, "losses": losses}


@click.command(help="Measures steps of two data-parallel times two tensor ranks.")
@click.option("--rounds", type=click.IntRange(2), default=7, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="In a turn.")
@click.option(
    "--network", help="The rate of the link between the two tensor groups, as tc takes it: 1gbit. Needs root."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/bench"), show_default=True)
def main(*, rounds: int, steps: int, network: str | None, out: Path) -> None:
    """The command."""
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        places = loopback_places(4)
        if network is not None:
            machines, address = stack.enter_context(shaped_network(2, check_rate(network)))
            places = namespace_places([machine for machine in machines for _ in range(2)], INTERFACE, address)
        status = stack.enter_context(console.status("starting"))
        ranks = run_ranks(places, time_in_turns, rounds, steps, on_word=lambda word: status.update(word))
    times, losses = ranks[0]["times"], ranks[0]["losses"]
    for name, loss in losses.items():
        if abs(loss - losses["ours"]) > _TOLERANCE * abs(losses["ours"]):
            raise SystemExit(f"{name} trained to a loss of {loss}, and ours to {losses['ours']}")
    table = Table("engine", "ms a step", "ratio to FSDP2 and TP")
    figures = {}
    for name, samples in times.items():
        ratios = Spread.of([mine / theirs for mine, theirs in zip(samples, times["fsdp2"], strict=True)])
        spread = Spread.of(samples)
        figures[name] = {"step_ms": dataclasses.asdict(spread), "ratio": dataclasses.asdict(ratios)}
        table.add_row(name, _shown(spread, 0), _shown(ratios, 2))
    Console().print(table)
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "rounds": rounds,
        "steps": steps,
        "network": network,
        "torch": torch.__version__,
        "losses": losses,
        **figures,
    }
    (out / "tensor_parallel.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
