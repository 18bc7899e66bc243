"""reduce_scatter_with_fp32_accumulation: 16 bits on the wire, and what fp32 on the wire would have given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import memory_use
from tests.support.data_path import memory_of
from tests.support.doubles import RecordingCollectives
from tests.support.ranks import run_ranks

SUMS_IN_FP32 = {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}


class Setup:
    def __init__(self, group: ProcessGroup, module: nn.Module, **options: Any) -> None:
        self.collectives = RecordingCollectives(group)
        config = DistributedDataParallelConfig(**{"bucket_size": 200, **options})
        self.model = DistributedDataParallel(module, config, collectives=self.collectives)
        self.optimizer = DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01), self.model)
        self.params = dict(module.named_parameters())


class Branches(nn.Module):
    """Every parameter is used once at most: autograd sums several uses in the gradient's dtype, which is what differs.
    One layer on odd steps only, one on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd = nn.Linear(7, 33), nn.Linear(33, 33)
        self.rank_zero, self.last = nn.Linear(33, 33), nn.Linear(33, 3)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data = (torch.randn(param.shape, generator=generator) * 0.3).bfloat16()

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.odd(x)) if step % 2 else x
        x = torch.tanh(self.rank_zero(x)) if rank == 0 else x
        return self.last(x).square().sum()


def train(rank: int, group: ProcessGroup, options: dict[str, Any]) -> tuple[list[Tensor], int]:
    module = Branches()
    setup = Setup(group, module, **options)
    for step in range(12):
        setup.optimizer.zero_grad()
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()
        setup.model(x, step, rank).backward()
        if step == 5:
            setup.optimizer.clip_grad_norm_(0.1)
        setup.optimizer.step()
    state = setup.optimizer.main_params()
    weights = [param.detach().clone() for param in module.parameters()]
    sent = sum(call.nbytes for call in setup.collectives.named("reduce_scatter", "reduce_scatter_into"))
    setup.model.close()
    return [*weights, *state.values()], sent


@pytest.mark.parametrize("options", [{}, {"overlap_param_gather": True}], ids=str)
def test_half_the_bytes_give_the_same_bits(options: dict[str, Any]) -> None:
    """On two ranks, where the sum has one order, and for gradients of one microbatch, which come in 16 bits."""
    expected = run_ranks(2, lambda rank, group: train(rank, group, {}))
    for (tensors, sent), (others, twice) in zip(
        run_ranks(2, lambda rank, group: train(rank, group, {**SUMS_IN_FP32, **options})), expected, strict=True
    ):
        assert all(map(torch.equal, tensors, others))
        assert 2 * sent == twice
    without = run_ranks(2, lambda rank, group: train(rank, group, {"grad_reduce_in_fp32": False}))
    assert not all(map(torch.equal, without[0][0], expected[0][0])), "sums in 16 bits are others"


def line() -> nn.Linear:
    module = nn.Linear(33, 5).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=generator).bfloat16()
    return module


def test_bytes_are_those_of_the_formula() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, line(), **SUMS_IN_FP32)
        numel = sum(buffer.numel for buffer in setup.model.layout.buffers)
        assert memory_use(setup.model.layout, rank, 2).grad_bytes == 2 * numel + 4 * numel // 2
        setup.model(torch.ones(1, 33, dtype=torch.bfloat16)).sum().backward()
        _, held = memory_of(setup.model)
        assert sum(tensor.nbytes for tensor in held) == 2 * numel + 4 * numel // 2
        setup.model.close()

    run_ranks(2, run)


def test_fp32_params_need_no_separate_sums() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = line().float() if group.size() > 1 else line()
        setup = Setup(group, module, **SUMS_IN_FP32)
        setup.model(torch.ones(1, 33, dtype=module.weight.dtype)).sum().backward()
        _, held = memory_of(setup.model)
        assert [tensor.dtype for tensor in held] == [module.weight.dtype]
        setup.model.close()

    run_ranks(1, run)
    run_ranks(2, run)
