"""The memory that a plan says for each stage, beside what the allocator counts in a pipeline that runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megastrategy
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Pipeline
from megastrategy.tools.plan.cards import parse_cards
from tests.support.pipelines import mesh_of
from tests.support.processes import run_processes
from tests.tools.planned_script import counted

WIDTH, SEQUENCE, MICROBATCH, DEPTH = 128, 64, 8, 6
FROZEN = {"nothing": (), "prefix": (0, 1), "middle": (2, 3)}
"""By name, the layers that are frozen."""


@dataclasses.dataclass(frozen=True)
class Case:
    split: tuple[int, ...]
    schedule: str
    frozen: str
    microbatches: int = 6
    kind: str = "blocks"


class Block(nn.Module):
    """Attention and an MLP, behind a norm each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    """An MLP around which its input goes; of its output it saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "blocks": lambda: [Block() for _ in range(DEPTH)],
    # Saves its output, so that an input's gradient is more than what a microbatch frees.
    "activations": lambda: [module for _ in range(3) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())],
    "views": lambda: [
        nn.Linear(WIDTH, WIDTH),
        nn.Identity(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Identity(),
        nn.Linear(WIDTH, WIDTH),
    ],
    # In the backward behind it the gradient of its input is free as soon as it is read.
    "dropout": lambda: [module for _ in range(3) for module in (Residual(), nn.Dropout(0.1))],
    "norms": lambda: [module for _ in range(3) for module in (nn.LayerNorm(WIDTH), Residual())],
    "embedding": lambda: [nn.Embedding(500, WIDTH), *(Block() for _ in range(DEPTH - 2)), nn.Linear(WIDTH, 500)],
}
"""By name, layers of a model."""


def layers(case: Case) -> list[nn.Module]:
    made = KINDS[case.kind]()
    for number in FROZEN[case.frozen]:
        made[number].requires_grad_(False)
    return made


def batch_of(case: Case, size: int) -> Tensor:
    return torch.randint(0, 500, (size, SEQUENCE)) if case.kind == "embedding" else torch.randn(size, SEQUENCE, WIDTH)


class MeanSquare(torch.autograd.Function):
    """A loss that takes no memory of the output's size but its gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return output.flatten().dot(output.flatten()) / output.numel()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        [output] = ctx.saved_tensors
        return output * (2.0 * grad / output.numel())


def loss(output: Tensor, target: Tensor) -> Tensor:
    mean: Tensor = MeanSquare.apply(output)
    return mean


def peaks(cases: list[Case]) -> list[int]:
    torch.set_num_threads(1)
    return [peak(case) for case in cases]


def peak(case: Case) -> int:
    """The most bytes at once in a step on this rank, with all that was there before it; the batch on the first stage,
    which alone uses it."""
    mesh, built = mesh_of(len(case.split)), list[Any]()
    x, target = torch.empty(0), torch.zeros(case.microbatches * MICROBATCH)

    def make_batch() -> None:
        nonlocal x
        torch.manual_seed(0)  # on all stages
        x = batch_of(case, case.microbatches * MICROBATCH)

    def build() -> None:
        with torch.device("meta"):  # so that a rank has memory for its own layers alone
            every = layers(case)
        net = Pipeline(
            every,
            case.split,
            loss=loss,
            microbatches=case.microbatches,
            schedule=case.schedule,
            mesh=mesh["pp"],
        )
        model = DistributedDataParallel(net, DistributedDataParallelConfig(), process_group=mesh.get_group("dp"))
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        built.append(model)
        model(x, target=target).backward()
        optimizer.step()
        optimizer.zero_grad()
        built.append(optimizer)

    batch, _ = counted(make_batch)
    left, _ = counted(build)
    _, most = counted(lambda: built[0](x, target=target))
    built[0].close()
    return left + most + (batch if mesh.get_local_rank("pp") == 0 else 0)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                Case((3, 2, 1), "1F1B", "middle"),
                Case((2, 3, 1), "GPipe", "nothing", kind="views"),
            ],
            id="short",
        ),
        pytest.param(
            [Case((1, 2, 3), schedule, "nothing", 3, kind) for schedule in ("1F1B", "GPipe") for kind in KINDS]
            + [Case((2, 2, 2), "1F1B", frozen) for frozen in FROZEN],
            id="kinds",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_stage_peak_equals_the_plan(cases: list[Case]) -> None:
    """The last stage needs up to one microbatch's output less, since the loss frees it in its backward."""
    by_rank = run_processes(3, peaks, cases, timeout_s=300.0)
    for number, case in enumerate(cases):
        plan = megastrategy.plan(
            layers(case),
            batch_of(case, MICROBATCH),
            devices=parse_cards("card=8GB@1TFLOPS:3"),
            microbatches=case.microbatches,
            schedule="1f1b" if case.schedule == "1F1B" else "gpipe",
            split_spec=case.split,
        )
        *before, last = plan.memory
        for stage, planned in enumerate(before):
            assert by_rank[stage][number] == pytest.approx(planned, rel=1e-3), f"{case}, stage {stage}"
        output = nn.Sequential(*layers(case))(batch_of(case, MICROBATCH))
        assert last * 0.999 - output.nbytes <= by_rank[len(before)][number] <= last * 1.001, f"{case}, the last stage"
