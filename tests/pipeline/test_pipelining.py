"""A stage of torch's pipelining around ours: refused where gradients would be wrong, and the way out is torch DDP's."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.events import Event, EventKind
from tests.support.processes import run_processes

MODES: dict[str, dict[str, Any]] = {"by default": {}, "gathered late": {"overlap_param_gather": "forward"}}
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


def the_way_out(kind: str, options: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
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


def refusals() -> dict[str, str]:
    """By what is not the way out. In pipelines of one stage, since the next one would wait for what it sends."""
    from torch.distributed.pipelining import PipelineStage, schedules

    grid = Grid()
    alone = [torch.distributed.new_group([rank]) for rank in range(4)][torch.distributed.get_rank()]
    found: dict[str, str] = {}

    def attempt(name: str, kind: str = "Schedule1F1B", *, no_sync: bool, steps: bool, **options: Any) -> None:
        model = DistributedDataParallel(grid.module, DistributedDataParallelConfig(**options), grid.data)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model) if steps else None
        stage: Any = PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
        several = [stage] if kind == "ScheduleInterleavedZeroBubble" else stage
        schedule = getattr(schedules, kind)(several, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
        inputs, target = batch(grid.column, 0)
        error: BaseException | None = None
        try:
            with model.no_sync() if no_sync else contextlib.nullcontext():
                schedule.step(inputs, target=target)
        except (RuntimeError, ValueError) as raised:
            error = raised
        while error is not None and type(error) is not ValueError:  # the stage puts one of its own around it
            error = error.__cause__ or error.__context__
        found[name] = str(error)
        del optimizer
        model.close()

    attempt("synchronised", no_sync=False, steps=True)
    attempt("pooled", no_sync=True, steps=True, grad_buffer="pooled")
    attempt("all-reduce", no_sync=True, steps=True, use_distributed_optimizer=False)
    attempt("no optimizer that reduces", no_sync=True, steps=False)
    attempt("split backwards", "ScheduleInterleavedZeroBubble", no_sync=True, steps=True)
    attempt("none", no_sync=True, steps=True)
    return found


KINDS = ["ScheduleGPipe", "Schedule1F1B"]
Trained = tuple[list[Tensor], dict[str, tuple[list[Tensor], list[int]]]]


def everything() -> tuple[dict[str, Trained], dict[str, str]]:
    trained = {
        kind: (with_torch_ddp(kind), {mode: the_way_out(kind, options) for mode, options in MODES.items()})
        for kind in KINDS
    }
    return trained, refusals()


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[dict[str, Trained], dict[str, str]]]:
    """By rank. One start of processes for all, since what they import takes seconds."""
    return run_processes(4, everything)


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_out_gives_the_weights_of_torch_ddp_and_reduces_once_a_step(outcomes: Any, kind: str) -> None:
    """Except for the last bits, as both are of one process with the whole batch: the order of sums differs."""
    for trained, _ in outcomes:
        expected, ours = trained[kind]
        for mode, (weights, reductions) in ours.items():
            assert reductions == [1] * NUM_STEPS, mode
            for mine, theirs in zip(weights, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-7, msg=lambda text, m=mode: f"{m}: {text}")


def test_what_would_be_wrong_is_refused_with_the_way_out(outcomes: Any) -> None:
    for _, found in outcomes:
        assert found["none"] == "None"
        assert re.search("ScheduleInterleavedZeroBubble computes.*Schedule1F1B", found["split backwards"])
        for name in ("synchronised", "pooled", "all-reduce", "no optimizer that reduces"):
            text = found[name]
            assert "stage of torch's pipelining" in text, name
            assert "with model.no_sync():\n        schedule.step(...)\n    optimizer.step()" in text, name
            assert "DistributedOptimizer" in text, name
            assert 'grad_buffer="contiguous"' in text, name


def test_a_forward_outside_of_a_stage_is_left_alone_when_pipelining_is_imported() -> None:
    import torch.distributed.pipelining  # noqa: F401

    from tests.support.ranks import run_ranks

    def run(rank: int, group: Any) -> None:
        model = DistributedDataParallel(stage_module(0), process_group=group)
        model(batch(rank, 0)[0]).sum().backward()
        assert model.full_grad(next(model.parameters())) is not None

    run_ranks(2, run)
