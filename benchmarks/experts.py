"""Step times of experts that are divided over data-parallel ranks, ep 2 x edp 2: ours against FSDP2 with two meshes.

    python -m benchmarks.experts
    sudo python -m benchmarks.experts --network 1gbit

All engines live in the same processes and take turns; the experts are divided alike, by torch's ``distribute_tensor``,
and exchange tokens in the same all-to-all. With a network the two ranks of an expert group are one machine, whose link
to the other machine has the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

from .in_turns import Step, adamw, run_in_turns, time_in_turns, trained, turns
from .processes import Rank

_VOCABULARY, _WIDTH, _DEPTH, _TIME, _BATCH = 4096, 256, 4, 64, 4
_NUM_EXPERTS, _TOP = 8, 2


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends ``sent[r]`` rows to rank r of a group and returns ``received[r]`` from it; backward returns gradients."""
    out = rows.new_empty(sum(received), rows.shape[1])
    result: Tensor = all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return result


class Experts(nn.Module):
    """A stack of MLPs over (rows, width), this rank's part of it; ``counts`` rows arrive for each expert."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        for name, shape in (("up", (_WIDTH, 2 * _WIDTH)), ("down", (2 * _WIDTH, _WIDTH))):
            weights = torch.randn(_NUM_EXPERTS, *shape) * shape[0] ** -0.5
            self.register_parameter(name, nn.Parameter(distribute_tensor(weights, mesh, [Shard(0)])))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns an output for each row, which are sorted by expert."""
        group, size = self.mesh.get_group(), self.mesh.size()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = (each.view(size, -1).sum(1).tolist() for each in (counts, arriving))
        arrived = _exchanged(rows, sent, received, group)
        by_expert = torch.arange(_NUM_EXPERTS // size).repeat(size).repeat_interleave(arriving).argsort(stable=True)
        parts = arrived[by_expert].split(arriving.view(size, -1).sum(0).tolist())
        up, down = (weights.to_local() for weights in (self.up, self.down))
        out = torch.cat([functional.gelu(part @ up[i]) @ down[i] for i, part in enumerate(parts)])
        returned: Tensor = _exchanged(torch.empty_like(out).index_copy(0, by_expert, out), received, sent, group)
        return returned


class Block(nn.Module):
    """Sends each token to the best two of eight experts, over (tokens, width)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _NUM_EXPERTS, bias=False)
        self.experts = Experts(mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``."""
        tokens = self.norm(x)
        weights, chosen = self.router(tokens).softmax(-1).topk(_TOP, -1)
        order = chosen.flatten().argsort(stable=True)
        rows = self.experts(tokens[order // _TOP], torch.bincount(chosen.flatten(), minlength=_NUM_EXPERTS))
        return x.index_add(0, order // _TOP, rows * weights.flatten()[order].unsqueeze(-1))


class Model(nn.Module):
    """Embedding, blocks and head: 10.5 million parameters, 8.4 million of them experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList([Block(mesh) for _ in range(_DEPTH)])
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) tokens -> the loss of each as its own successor."""
        x = self.embed(tokens).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)), tokens.roll(-1, 1).flatten())


def _model(mesh: DeviceMesh) -> Model:
    torch.manual_seed(0)
    return Model(mesh["ep"])


def _ours(mesh: DeviceMesh, **options: Any) -> Step:
    model = DistributedDataParallel(_model(mesh), DistributedDataParallelConfig(**options), expert_mesh=mesh)
    return trained(model, DistributedOptimizer(adamw(model.parameters()), model))


def _fsdp2(mesh: DeviceMesh) -> Step:
    model = _model(mesh)
    every = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block.experts, mesh=mesh["edp"], reshard_after_forward=False)
        # The mean over all ranks, by a sum: gloo has no reduction that scales.
        block.experts.set_gradient_divide_factor(mesh.size())  # type: ignore[union-attr, operator]
        block.experts.set_force_sum_reduction_for_comms(True)  # type: ignore[union-attr, operator]
        fully_shard(block, mesh=every, reshard_after_forward=False)
    return trained(fully_shard(model, mesh=every, reshard_after_forward=False), adamw(model.parameters()))


_ENGINES: dict[str, Callable[[DeviceMesh], Step]] = {
    "ours": _ours,
    "ours, param gather under forward": lambda mesh: _ours(mesh, overlap_param_gather=True),
    "fsdp2": _fsdp2,
}
"""``fsdp2`` does not reshard after forward; the others have their defaults but for what is named."""


def measure(rank: Rank, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Times of all engines, on two expert ranks times two copies."""
    mesh = init_device_mesh("cpu", (rank.size // 2, 2), mesh_dim_names=("edp", "ep"))
    engines = {name: make(mesh) for name, make in _ENGINES.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randint(_VOCABULARY, (num_steps + 1, _BATCH, _TIME), generator=generator)
    return time_in_turns(rank, engines, batches, num_rounds)


@click.command(help="Measures steps of experts on two expert ranks times two copies.")
@turns
def main(**options: Any) -> None:
    """The command."""
    run_in_turns(measure, "fsdp2", "experts.json", **options)


if __name__ == "__main__":
    main()
