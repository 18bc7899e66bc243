"""A stage of torch's pipelining around ours trains as with torch DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.events import Event, EventKind
from tests.support.processes import run_processes

MODES: dict[str, dict[str, Any]] = {"by default": {}, "gathered late": {"overlap_param_gather": True}}
NUM_MICROBATCHES = 4
NUM_STEPS = 2


def stage_module(stage: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    generator = torch.Generator().manual_seed(stage)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return module


def batch(column: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + column)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


class Grid:
    """Two stages of two data-parallel ranks each: ranks 0 and 1 have the first stage, 2 and 3 the second."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
        self.stages, self.data = mesh.get_group("stage"), mesh.get_group("data")
        self.stage, self.column = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
        self.module = stage_module(self.stage)

    def schedule(self, kind: str, model: nn.Module) -> Any:
        from torch.distributed.pipelining import PipelineStage, schedules

        stage = PipelineStage(model, self.stage, 2, torch.device("cpu"), group=self.stages)
        return getattr(schedules, kind)(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def step(self, schedule: Any, step: int) -> None:
        inputs, target = batch(self.column, step)
        if self.stage == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=target)


def with_torch_ddp(kind: str) -> list[Tensor]:
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    grid = Grid()
    # without find_unused_parameters torch 2.13 ends in an internal assertion when it rebuilds its buckets
    model = TorchDDP(grid.module, process_group=grid.data, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = grid.schedule(kind, model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        grid.step(schedule, step)
        optimizer.step()
    return [param.detach().clone() for param in grid.module.parameters()]


def with_ours(kind: str, options: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
    """The weights, and how many buckets were reduced in each step."""
    grid = Grid()
    reductions: list[int] = []

    def listen(event: Event) -> None:
        if event.kind is EventKind.REDUCE_START:
            reductions[-1] += 1

    config = DistributedDataParallelConfig(bucket_size=10**6, **options)
    model = DistributedDataParallel(grid.module, config, grid.data, listener=listen)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    schedule = grid.schedule(kind, model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        reductions.append(0)
        with model.no_sync():
            grid.step(schedule, step)
        optimizer.step()
    model.close()
    return [param.detach().clone() for param in grid.module.parameters()], reductions


KINDS = ["ScheduleGPipe", "Schedule1F1B"]


Trained = tuple[list[Tensor], dict[str, tuple[list[Tensor], list[int]]]]


def train_all() -> dict[str, Trained]:
    return {
        kind: (with_torch_ddp(kind), {mode: with_ours(kind, options) for mode, options in MODES.items()})
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Trained]]:
    """By rank. One start of processes for all, since what they import takes seconds."""
    return run_processes(4, train_all)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_equal_torch_ddp(outcomes: Any, kind: str) -> None:
    """Except for the last bits, as both are of one process with the whole batch: the order of sums differs."""
    for trained in outcomes:
        expected, ours = trained[kind]
        for mode, (weights, reductions) in ours.items():
            assert reductions == [1] * NUM_STEPS, mode
            for mine, theirs in zip(weights, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-7, msg=lambda text, m=mode: f"{m}: {text}")
