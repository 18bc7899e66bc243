"""Step times of two data-parallel times two tensor ranks: ours against torch's data parallelisms beside its TP.

    python -m benchmarks.tensor_parallel
    sudo python -m benchmarks.tensor_parallel --network 1gbit

All engines live in the same processes and take turns; the model is cut alike, by torch's ``parallelize_module``. With a
network the two ranks of a tensor group are one machine, whose link to the other machine has the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

from .in_turns import Step, adamw, run_in_turns, time_in_turns, trained, turns
from .processes import Rank

_VOCABULARY, _WIDTH, _DEPTH, _TIME, _BATCH = 8192, 384, 4, 64, 2


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


def _ours(mesh: DeviceMesh, **options: Any) -> Step:
    config = DistributedDataParallelConfig(**options)
    model = DistributedDataParallel(_cut(mesh), config, process_group=mesh.get_group("dp"))
    return trained(model, DistributedOptimizer(adamw(model.parameters()), model))


def _fsdp2(mesh: DeviceMesh) -> Step:
    model = _cut(mesh)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    return trained(model, adamw(model.parameters()))


def _replicate(mesh: DeviceMesh) -> Step:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = _cut(mesh)
    for part in (*model.blocks, model):
        replicate(part, mesh=mesh["dp"])
    return trained(model, adamw(model.parameters()))


_ENGINES: dict[str, Callable[[DeviceMesh], Step]] = {
    "ours": _ours,
    "ours, param gather under forward": lambda mesh: _ours(mesh, overlap_param_gather=True),
    "fsdp2": _fsdp2,
    "replicate": _replicate,
}
"""``fsdp2`` does not reshard after forward; the others have their defaults but for what is named."""


def measure(rank: Rank, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Times of all engines, on two data-parallel times two tensor ranks."""
    mesh = init_device_mesh("cpu", (rank.size // 2, 2), mesh_dim_names=("dp", "tp"))
    engines = {name: make(mesh) for name, make in _ENGINES.items()}
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    batches = torch.randint(_VOCABULARY, (num_steps + 1, _BATCH, _TIME), generator=generator)
    return time_in_turns(rank, engines, batches, num_rounds)


@click.command(help="Measures steps of two data-parallel times two tensor ranks.")
@turns
def main(**options: Any) -> None:
    """The command."""
    run_in_turns(measure, "fsdp2", "tensor_parallel.json", **options)


if __name__ == "__main__":
    main()
