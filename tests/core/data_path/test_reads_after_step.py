"""Reads between a step and the next forward of parameters that are no plain Parameter, with overlapped gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.doubles import DelayingCollectives
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks

READS: dict[str, Callable[[Any], Tensor]] = {
    "full_tensor": lambda param: param.full_tensor(),
    "to_local": lambda param: param.to_local(),
    "the local tensor": lambda param: param._local_tensor,
    "redistribute": lambda param: param.redistribute(placements=[Shard(1)]).to_local(),
    "norm": lambda param: param.norm().full_tensor(),
}


class Borrows(nn.Module):
    """The second layer's forward reads the first layer's DTensor."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
        self.first = nn.ParameterDict({"weight": Parameter(distribute_tensor(weight, mesh, [Shard(0)]))})
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        # The second layer's bucket arrives last, so that waiting for it would hide a stale read of the first one.
        local = self.first["weight"].to_local()
        return self.second(x @ local.T @ local)


def train(overlap: bool | str, read: Callable[[Any], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the readings after each step and the weights at the end."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    module = Borrows(mesh["tp"])
    group = mesh.get_group("dp")
    model = DistributedDataParallel(
        module,
        DistributedDataParallelConfig(bucket_size=64, overlap_param_gather=overlap),
        group,
        collectives=DelayingCollectives(group, 0.05, ("all_gather",)),
    )
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    readings = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 8), 1.0 + dist.get_rank())).square().mean().backward()
        optimizer.step()
        readings.append(read(module.first["weight"]).detach().clone())
    model.close()
    weights = [param.to_local() if isinstance(param, DTensor) else param for param in module.parameters()]
    return readings, [weight.detach() for weight in weights]


def read_both() -> dict[str, list[tuple[list[Tensor], list[Tensor]]]]:
    return {name: [train(overlap, read) for overlap in (False, True)] for name, read in READS.items()}


def test_dtensor_reads_see_the_step() -> None:
    for answers in run_processes(2, read_both):
        for name, ((readings, weights), (overlapped, overlapped_weights)) in answers.items():
            assert not torch.equal(readings[0], readings[1]), name
            assert all(map(torch.equal, readings, overlapped)), name
            assert all(map(torch.equal, weights, overlapped_weights)), name


class Quiet(Parameter):
    """A parameter whose operations do not dispatch on its class, as quantised weights may define it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def memory(self) -> list[float]:
        return self.detach().reshape(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_subclass_reads_see_the_step(dtype: torch.dtype) -> None:
    def run(rank: int, group: ProcessGroup, overlap: bool) -> list[list[float]]:
        torch.manual_seed(0)
        weight = torch.linspace(-1.0, 1.0, 48, dtype=dtype).view(6, 8)
        module = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 6, bias=False, dtype=dtype))
        module[0].weight.data, module[0].bias.data = torch.ones(8, 8, dtype=dtype), torch.ones(8, dtype=dtype)
        module[1].weight = quiet = Quiet(weight)
        model = DistributedDataParallel(
            module,
            DistributedDataParallelConfig(bucket_size=48, overlap_param_gather=overlap),
            collectives=DelayingCollectives(group, 0.05, ("all_gather",)),
        )
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
        readings = []
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((4, 8), 1.0 + rank, dtype=dtype)).square().mean().backward()
            optimizer.step()
            readings.append(quiet.memory())
        model.close()
        return readings

    expected = run_ranks(2, lambda rank, group: run(rank, group, False))
    assert expected[0] == expected[1]
    assert run_ranks(2, lambda rank, group: run(rank, group, True)) == expected
