"""Divided experts where ranks have parts of sequences, and other numbers of labels: beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.experts import WIDTH, Experts, expert_mesh
from tests.support.processes import run_processes
from tests.support.tensor_parallel import whole
from tests.support.tiers import cases_that_run

RANKS, CP, STEPS, IGNORED = 4, 2, 6, -100
OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_distributed_optimizer": False},
    {"grad_buffer": "pooled"},
    {"num_distributed_optimizer_instances": 2},
]


class GatherRows(torch.autograd.Function):
    """The rows of all ranks of a group, in order; in backward, each rank's get the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.place = group, (dist.get_rank(group), len(rows))
        every = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, rows.contiguous(), group=group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        rank, numel = ctx.place
        return grad[rank * numel :][:numel], None


class Reader(nn.Module):
    """Causal attention over one sequence, or over the part of it that a rank has, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.experts = Experts(4)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden, first = self.embed(x), 0
        keys, values = self.keys(hidden), self.values(hidden)
        if self.group is not None:
            first = dist.get_rank(self.group) * len(x)
            keys, values = GatherRows.apply(keys, self.group), GatherRows.apply(values, self.group)
        scores = self.queries(hidden) @ keys.T * WIDTH**-0.5
        is_later = torch.arange(len(keys)) > torch.arange(first, first + len(x)).unsqueeze(1)
        hidden = hidden + scores.masked_fill(is_later, -torch.inf).softmax(-1) @ values
        out: Tensor = self.head(self.experts(hidden))
        return out


def make_reader() -> Reader:
    torch.manual_seed(3)
    return Reader()


def sequence(dp_rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A sequence and its labels. Some are ignored; the last sequence is short, and one begins without labels."""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    length = 6 if step == STEPS - 1 else 12
    x, y = torch.randn(length, 4, generator=generator), torch.randint(3, (length,), generator=generator)
    y[: 1 + 2 * dp_rank + step % 3] = IGNORED
    if (dp_rank, step) == (1, 2):
        y[: length // CP] = IGNORED
    return x, y


def train_parts(numbers: list[int]) -> dict[int, tuple[dict[str, Tensor], list[float]]]:
    """Weights and norms with each of the options, by their number."""
    found = {}
    for number in numbers:
        mesh, module = init_device_mesh("cpu", (RANKS // CP, CP), mesh_dim_names=("dp", "cp")), make_reader()
        experts = expert_mesh(2)
        module.experts.divide(experts["ep"])
        module.group = mesh.get_group("cp")
        config = DistributedDataParallelConfig(bucket_size=200, **OPTIONS[number])
        model = DistributedDataParallel(module, config, expert_mesh=experts)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9), model)
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = (each.chunk(CP)[mesh.get_local_rank("cp")] for each in sequence(mesh.get_local_rank("dp"), step))
            num_labels = int((y != IGNORED).sum())
            loss = functional.cross_entropy(model(x), y, ignore_index=IGNORED)  # NaN without labels
            model.weigh_by_tokens(loss, num_labels).backward()
            norms.append(float(optimizer.clip_grad_norm_(0.5)))
            optimizer.step()
        model.finish_param_gather()
        found[number] = {name: whole(param) for name, param in module.named_parameters()}, norms
        model.check_replicas()
        model.close()
    return found


def train_alone() -> tuple[dict[str, Tensor], list[float]]:
    """The mean over the labels of all ranks."""
    module = make_reader()
    optimizer, norms = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9), []
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [sequence(dp_rank, step) for dp_rank in range(RANKS // CP)]
        total = sum(int((y != IGNORED).sum()) for _, y in batches)
        for x, y in batches:
            (functional.cross_entropy(module(x), y, ignore_index=IGNORED, reduction="sum") / total).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
    return {name: param.detach() for name, param in module.named_parameters()}, norms


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[Any]:
    return run_processes(RANKS, train_parts, [number for (number,) in cases_that_run(request, "number")])


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=lambda number: str(OPTIONS[number]))
def test_parts_of_sequences_with_divided_experts_train_as_one_process(ranks: list[Any], number: int) -> None:
    """dp 2 x cp 2 ranks, over which experts are divided ep 2 x edp 2; each rank counts its own labels."""
    weights, norms = train_alone()
    for by_option in ranks:
        found, found_norms = by_option[number]
        assert found_norms == pytest.approx(norms, rel=1e-4)
        torch.testing.assert_close(found, weights, rtol=0.0, atol=1e-6)
