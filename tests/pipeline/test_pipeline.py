"""Stages on several ranks train a chain of layers as one process does, by the division that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.events import Event, EventKind
from megastrategy.pipeline.plan import StagePlan, make_plan
from tests.support.pipelines import ROUNDING, Case, Outcome, mesh_of, train_alone, train_on
from tests.support.processes import run_processes

TWO = [
    Case((2, 4), tied=True, steps=3),
    Case((4, 2), "GPipe", "prefix", steps=3),
    Case((1, 2, 1, 2), "Interleaved1F1B", "middle", tied=True, steps=3),
    Case((2, 4), frozen="tail", dtype=torch.bfloat16, steps=3),
    Case((2, 4), tied=True, steps=3, options=(("grad_buffer", "pooled"),)),
    Case((2, 4), tied=True, steps=3, options=(("use_distributed_optimizer", False),)),
    Case((2, 4), tied=True, steps=3, options=(("overlap_param_gather", True),)),
]
THREE = [
    Case((1, 3, 2), tied=True),
    Case((2, 1, 3), "GPipe", "tail"),
    Case((1, 1, 1, 1, 1, 1), "Interleaved1F1B", "middle", dtype=torch.bfloat16),
]
FOUR = [Case((1, 2, 1, 2), frozen="middle", tied=True), Case((2, 1, 1, 2), "GPipe", "prefix")]


def trained(pp: int, cases: list[Case], tp: int | None = None) -> list[Outcome]:
    mesh = mesh_of(pp, tp)
    return [train_on(mesh, case) for case in cases]


@pytest.mark.parametrize(
    ("pp", "dp", "cases"),
    [
        pytest.param(2, 2, TWO, id="2x2"),
        pytest.param(3, 1, THREE, id="3x1", marks=pytest.mark.nightly),
        pytest.param(4, 2, FOUR, id="4x2", marks=pytest.mark.nightly),
    ],
)
def test_stages_equal_one_process(pp: int, dp: int, cases: list[Case]) -> None:
    check_against_one_process(dp, cases, run_processes(pp * dp, trained, pp, cases, timeout_s=300.0))


SOME_CUT = [
    Case((1, 2, 1, 2), "Interleaved1F1B", "middle", tied=True, steps=3, sequence_parallel=True),
    Case((2, 4), frozen="tail", dtype=torch.bfloat16, steps=3),
]


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_cut_stages_equal_one_process(dp: int) -> None:
    """On stages times data-parallel times tensor ranks."""
    by_rank = run_processes(4 * dp, trained, 2, SOME_CUT, 2, timeout_s=300.0)
    check_against_one_process(dp, SOME_CUT, by_rank)
    for number, case in enumerate(SOME_CUT):
        for rank in range(0, 4 * dp, 2):
            ours, theirs = (by_rank[r][number] for r in (rank, rank + 1))
            replicas = [name for name, part in ours.parts.items() if part.shape == ours.weights[name].shape]
            assert replicas or case.frozen != "nothing"
            for name in replicas:
                assert torch.equal(ours.parts[name], theirs.parts[name]), f"{case}, {name}: to the bit"


def check_against_one_process(dp: int, cases: list[Case], by_rank: list[list[Outcome]]) -> None:
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        alone = train_alone(case, dp)
        found = {name: weight for outcome in outcomes for name, weight in outcome.weights.items()}
        assert found.keys() == alone.weights.keys()
        tolerance = ROUNDING if case.dtype == torch.float32 else 2.0**-7  # two steps of bf16 near one
        for rank, outcome in enumerate(outcomes):
            for name, weight in outcome.weights.items():
                error = (weight.float() - alone.weights[name].float()).abs().max().item()
                assert error <= tolerance, f"{case}, rank {rank}, {name}: {error}"
            assert outcome.norms == outcomes[0].norms, "the same bits on every rank"
        rough = case.dtype != torch.float32
        torch.testing.assert_close(outcomes[0].norms, alone.norms, rtol=0.05 if rough else 2e-6, atol=0.0)
        torch.testing.assert_close(outcomes[0].losses, alone.losses, rtol=0.01 if rough else 1e-6, atol=0.0)
        assert_copies_are_equal(case, outcomes)


def assert_copies_are_equal(case: Case, outcomes: tuple[Outcome, ...]) -> None:
    """To the bit, also between data-parallel ranks."""
    names = {"layers.0.weight", "layers.5.weight"} if case.tied else set()
    copies = [weight for outcome in outcomes for name, weight in outcome.weights.items() if name in names]
    for copy in copies:
        assert torch.equal(copy, copies[0])


# --- divisions --------------------------------------------------------------------------------------------------------


NAMES = ["Embedding", "Block", "Block", "Projector", "Projector", "Block", "Head"]


def test_plan_has_layers_of_stages_and_ranks() -> None:
    plan = make_plan(NAMES, [1, 2, 2, 2], 2, "Interleaved1F1B", [(3, 4)])
    assert [list(plan.layers(stage)) for stage in range(4)] == [[0], [1, 2], [3, 4], [5, 6]]
    assert [list(plan.stages_of(rank)) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [plan.rank_of(layer) for layer in range(7)] == [0, 1, 1, 0, 0, 1, 1]
    assert plan == StagePlan((1, 2, 2, 2), 2)


@pytest.mark.parametrize(
    ("spec", "ranks", "schedule", "together", "said"),
    [
        ([3, 3], 2, "1F1B", [], "divides 6 layers, and there are 7, from Embedding to Head"),
        ([7, 0], 2, "1F1B", [], "every stage has at least one layer"),
        ([3, 4], 3, "1F1B", [], "has 2 stages, and schedule='1F1B' on 3 ranks needs 3"),
        ([3, 4], 2, "Interleaved1F1B", [], "needs 4, or another multiple of 2 above it"),
        ([4, 3], 2, "1F1B", [(3, 4)], "cuts between layer 3 (Projector) and layer 4 (Projector)"),
        ([4, 3], 2, "1F1B", [(5, 7)], "expected numbers of layers, 0 to 6"),
        ([4, 3], 2, "ZBVZeroBubble", [], "computes the gradients of weights apart from backward"),
        ([4, 3], 2, "1f1b", [], "there is no such schedule. Choose one of 'GPipe', '1F1B', 'Interleaved1F1B'"),
    ],
)
def test_wrong_division_is_refused(
    spec: list[int], ranks: int, schedule: str, together: list[tuple[int, int]], said: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        make_plan(NAMES, spec, ranks, schedule, together)
    assert said in str(caught.value)


# --- a stage of torch's pipelining around ours trains as with torch DDP ----------------------------------------------


NUM_MICROBATCHES = 4
NUM_STEPS = 2


def stage_module(stage: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    generator = torch.Generator().manual_seed(stage)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return module


def batch_of_column(column: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + column)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


class Grid:
    """Two stages of two data-parallel ranks each: ranks 0 and 1 have the first stage, 2 and 3 the second."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
        self.stages, self.data = mesh.get_group("stage"), mesh.get_group("data")
        self.stage, self.column = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
        self.module = stage_module(self.stage)

    def schedule(self, kind: str, model: nn.Module) -> Any:
        stage = PipelineStage(model, self.stage, 2, torch.device("cpu"), group=self.stages)
        return getattr(schedules, kind)(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def step(self, schedule: Any, step: int) -> None:
        inputs, target = batch_of_column(self.column, step)
        if self.stage == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=target)


def with_torch_ddp(kind: str) -> list[Tensor]:
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


def with_ours(kind: str) -> tuple[list[Tensor], list[int]]:
    """The weights, and how many buckets were reduced in each step."""
    grid = Grid()
    reductions: list[int] = []

    def listen(event: Event) -> None:
        if event.kind is EventKind.REDUCE_START:
            reductions[-1] += 1

    config = DistributedDataParallelConfig(bucket_size=10**6, overlap_param_gather=True)
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


def with_both(kind: str) -> tuple[list[Tensor], list[Tensor], list[int]]:
    return with_torch_ddp(kind), *with_ours(kind)


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
def test_stages_of_torch_equal_torch_ddp(kind: str) -> None:
    """Except for the last bits, as both are of one process with the whole batch: the order of sums differs."""
    for expected, weights, reductions in run_processes(4, with_both, kind):
        assert reductions == [1] * NUM_STEPS
        for mine, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-7)
