"""Whole parameters on three and four ranks, where torch DDP adds gradients in another order.

Muon rounds what it orthogonalises to bf16, and Shampoo takes roots of near-singular factors: either makes thousands of
the last bit of a sum. So equality is shown where that bit does not matter, in fp64, and where it is the same, against
plain torch that adds in the same order.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.layout.layout import BufferLayout
from tests.support.models import two_layers
from tests.support.ranks import run_ranks
from tests.support.training import assert_close, train_with_ddp, train_with_ours
from tests.support.whole_params import KINDS, SOME, WholeRun, batch, model_on, same


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize(
    ("run", "options"),
    [
        ({}, {}),
        ({"accumulate": 3}, {"grad_buffer": "pooled"}),
        ({"clip_norm": 0.05}, {"overlap_param_gather": True}),
    ],
    ids=str,
)
def test_equal_to_torch_ddp_in_fp64(kind: str, size: int, run: dict[str, Any], options: dict[str, Any]) -> None:
    """Clipped too. More ranks than there are matrices, too."""
    made = WholeRun(kind=kind, dtype=torch.float64, **run)
    ours = train_with_ours(made, size, DistributedDataParallelConfig(bucket_size=SOME, **options))
    reference = train_with_ddp(made, size)
    assert_close(ours, reference, 1e-10)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.norms, theirs.norms, rtol=1e-12, atol=0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_close_to_torch_ddp_in_fp32(kind: str, size: int) -> None:
    """As close as torch DDP is to itself with other buckets, whose sums have another order too: 1e-6 in four steps."""
    run = WholeRun(kind=kind, steps=4)
    ours = train_with_ours(run, size, DistributedDataParallelConfig(bucket_size=SOME))
    if kind in ("muon", "shampoo"):
        assert_close(ours, train_with_ddp(run, size), 2e-5)
    else:
        # A bias under Adafactor has moved by 1e-5 from zero, where the last bits of sums, which processors differ in,
        # are 1.3e-6 of it: torch DDP's own distance from fp64.
        exact = train_with_ddp(dataclasses.replace(run, dtype=torch.float64), size)
        assert_close(ours, train_with_ddp(run, size), 1e-6, exact)


def mean_in_order(grads: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
    """The mean over ranks of a part of their gradients, the first of ``ranks`` first."""
    first, *others = (grads[rank].float() * (1.0 / len(grads)) for rank in ranks)
    for other in others:
        first = other + first
    return first


def order_of_sums(grad_buffer: str, shard: int, size: int) -> list[int]:
    """Contiguous buffers are summed by a ring, whose last rank is the one that keeps the sum; pooled ones by rank."""
    return [(shard + place) % size for place in range(1, size + 1)] if grad_buffer == "contiguous" else [*range(size)]


def train_alone(
    kind: str, size: int, layouts: Sequence[BufferLayout], dtype: torch.dtype, grad_buffer: str
) -> tuple[list[Tensor], Any]:
    """Plain torch in one process with the data of all ranks; ``layouts``: of each step, which say who keeps what.

    16-bit weights are the rounding of fp32 ones, which are stepped.
    """
    module = two_layers().to(dtype)
    params = list(module.parameters())
    mains = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = KINDS[kind](mains)
    for step, layout in enumerate(layouts):
        by_rank: list[list[Tensor]] = []
        for rank in range(size):
            module.zero_grad()
            module(batch(rank, step, dtype)).square().mean().backward()
            by_rank.append([param.grad.flatten() for param in params if param.grad is not None])
        for index, main in enumerate(mains):
            first = layout.slots[index].start
            parts = []
            for shard, (_, start, end) in layout.holders(index):
                grads = [of_rank[index][start - first : end - first] for of_rank in by_rank]
                parts.append(mean_in_order(grads, order_of_sums(grad_buffer, shard, size)))
            main.grad = torch.cat(parts).view_as(main)
        optimizer.step()
        with torch.no_grad():
            for param, main in zip(params, mains, strict=True):
                param.copy_(main)
    return [param.detach() for param in params], optimizer.state_dict()["state"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_buffer", ["contiguous", "pooled"])
def test_equal_to_the_bit_to_torch_that_adds_in_the_same_order(
    kind: str, size: int, dtype: torch.dtype, grad_buffer: str
) -> None:
    def run(rank: int, group: ProcessGroup) -> tuple[list[BufferLayout], list[Tensor], Any]:
        module, model = model_on(group, dtype, grad_buffer=grad_buffer)
        optimizer = DistributedOptimizer(KINDS[kind](list(module.parameters())), model)
        layouts = []
        for step in range(6):
            model(batch(rank, step, dtype)).square().mean().backward()
            layouts.append(model.layout)
            optimizer.step()
            optimizer.zero_grad()
        return layouts, [param.detach().clone() for param in module.parameters()], copy.deepcopy(optimizer.state_dict())

    by_rank = run_ranks(size, run)
    weights, state = train_alone(kind, size, by_rank[0][0], dtype, grad_buffer)
    for _, mine, _ in by_rank:
        assert same(mine, weights)
    assert same(by_rank[0][2]["state"], state)
