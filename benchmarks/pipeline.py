"""Step times of two stages times two data-parallel ranks: ours against torch's schedule with its own data parallelisms.

    python -m benchmarks.pipeline
    sudo python -m benchmarks.pipeline --network 1gbit

All engines live in the same processes and take turns, under the same 1F1B schedule of torch's. With a network the two
data-parallel ranks of a stage are on two machines, whose link has the rate, and its stages are on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Pipeline

from .in_turns import Step, adamw, run_in_turns, time_in_turns, turns
from .processes import Rank
from .tensor_parallel import Block

_DEPTH, _WIDTH, _TIME, _BATCH, _MICROBATCHES, _VOCABULARY = 4, 384, 64, 8, 4, 8192
_SPLIT = 3, 3
"""Embedding and two blocks; two blocks and the head."""


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    embed, head = nn.Embedding(_VOCABULARY, _WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False)
    nn.init.normal_(embed.weight, std=0.02)
    return [embed, *(Block() for _ in range(_DEPTH)), nn.Sequential(nn.LayerNorm(_WIDTH), head)]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _ours(mesh: DeviceMesh, **options: Any) -> Step:
    net = Pipeline(_layers(), _SPLIT, loss=_loss, microbatches=_MICROBATCHES, mesh=mesh["pp"])
    model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), process_group=mesh.get_group("dp"))
    optimizer = DistributedOptimizer(adamw(model.parameters()), model)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(tokens, target=tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _torchs(mesh: DeviceMesh, shard: Callable[[nn.Module], Any]) -> Step:
    """torch's schedule over a stage that ``shard`` has wrapped, block by block."""
    group, place = mesh.get_group("pp"), mesh.get_local_rank("pp")
    first = sum(_SPLIT[:place])
    module = nn.Sequential(*_layers()[first : first + _SPLIT[place]])
    for part in (*module, module):
        shard(part)
    optimizer = adamw(module.parameters())
    stage = PipelineStage(module, place, len(_SPLIT), torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, _MICROBATCHES, loss_fn=_loss)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(tokens, return_outputs=False)
        else:
            schedule.step(target=tokens.roll(-1, 1), losses=losses, return_outputs=False)
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, group=group, group_src=len(_SPLIT) - 1)
        return loss

    return step


def _fsdp2(mesh: DeviceMesh) -> Step:
    return _torchs(mesh, lambda part: fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False))


def _replicate(mesh: DeviceMesh) -> Step:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return _torchs(mesh, lambda part: replicate(part, mesh=mesh["dp"]))


_ENGINES: dict[str, Callable[[DeviceMesh], Step]] = {
    "ours": _ours,
    "ours, param gather under forward": lambda mesh: _ours(mesh, overlap_param_gather=True),
    "fsdp2": _fsdp2,
    "replicate": _replicate,
}
"""``fsdp2`` does not reshard after forward; the others have their defaults but for what is named."""


def measure(rank: Rank, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Times of all engines, on four ranks. The first two are on one machine."""
    mesh = DeviceMesh("cpu", torch.arange(rank.size).view(2, 2).T.contiguous(), mesh_dim_names=("pp", "dp"))
    engines = {name: make(mesh) for name, make in _ENGINES.items()}
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    batches = torch.randint(_VOCABULARY, (num_steps + 1, _BATCH, _TIME), generator=generator)
    return time_in_turns(rank, engines, batches, num_rounds)


@click.command(help="Measures steps of two stages times two data-parallel ranks.")
@turns
def main(**options: Any) -> None:
    """The command."""
    run_in_turns(measure, "fsdp2", "pipeline.json", **options)


if __name__ == "__main__":
    main()
