"""grad_buffer="pooled" trains as persistent buffers do, whatever is done to gradients between backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.gradients import assert_equal, batch, grads_with_ddp, grads_with_ours
from tests.support.models import two_layers
from tests.support.pooled import POOLED, config, half, one_large
from tests.support.ranks import run_ranks
from tests.support.training import (
    Run,
    assert_close,
    assert_same_bits,
    train_with_ddp,
    train_with_ours,
)

# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2])
def test_pooled_has_bits_of_persistent_buffers(size: int) -> None:
    """With sums in the order of the ranks: on three ranks torch's and the ring's order is another."""
    fp32_sums = {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False}
    run = Run(options=(("lr", 0.01), ("eps", 1e-4)), groups=3)
    if size == 2:
        assert_same_bits(train_with_ours(run, 2, config()), train_with_ddp(run, 2))
    assert_close(train_with_ours(run, size, config()), train_with_ddp(run, size), 1e-6)
    in_bf16 = Run(groups=3, dtype=torch.bfloat16)
    contiguous = train_with_ours(in_bf16, size, DistributedDataParallelConfig(bucket_size=200, **fp32_sums))
    for options in (fp32_sums, {"grad_reduce_in_fp32": False}):
        assert_same_bits(train_with_ours(in_bf16, size, config(**options)), contiguous)
    if size == 2:
        sent_as_fp32 = train_with_ours(in_bf16, 2, DistributedDataParallelConfig(bucket_size=200))
        assert_same_bits(train_with_ours(in_bf16, 2, config()), sent_as_fp32)


@pytest.mark.parametrize("size", [2, 3])
def test_pooled_sums_are_fp32_to_the_bit(size: int) -> None:
    """bf16 gradients of several microbatches, by hand: over ranks in their order, then over microbatches."""
    numbers = range(4)

    def local(rank: int, number: int) -> list[Tensor]:
        module = one_large(torch.bfloat16)
        module(batch(rank, number).bfloat16()).square().sum().backward()
        return [param.grad.float() for param in module.parameters() if param.grad is not None]

    expected = [torch.zeros_like(grad) for grad in local(0, 0)]
    for number in numbers:
        by_rank = [local(rank, number) for rank in range(size)]
        for index, total in enumerate(expected):
            of_microbatch = torch.zeros_like(total)
            for rank in range(size):
                of_microbatch += by_rank[rank][index] * (1.0 / size)
            total += of_microbatch

    def run(rank: int, group: ProcessGroup) -> None:
        options = config(bucket_size=1000, grad_reduce_in_fp32=False)
        model = DistributedDataParallel(one_large(torch.bfloat16), options, group)
        for number in numbers:
            with model.no_sync():
                model(batch(rank, number).bfloat16()).square().sum().backward()
        for param, total in zip(model.module.parameters(), expected, strict=True):
            grad = model.full_grad(param)
            assert grad is not None
            assert grad.dtype == torch.float32
            assert torch.equal(grad, total)
        model.close()

    run_ranks(size, run)


# --- what users do between backwards ---------------------------------------------------------------------------------


class Parts(nn.Module):
    """Uses the parts whose numbers are passed."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.parts = nn.ModuleList(nn.Linear(10, 5) for _ in range(4))
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.3

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return sum(self.parts[number](x).square().sum() for number in used)  # type: ignore[return-value]


@pytest.mark.parametrize("static", [False, True])
def test_pooled_params_unused_by_some_ranks(static: bool) -> None:
    """No rank uses part 3, and the optimizer skips it although it has weight decay."""
    used = {0: [(0, 1), (0, 1)], 1: [(0, 2), (0, 2)]} if static else {0: [(0, 1), (0,)], 1: [(0,), (2,)]}

    def train(rank: int, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for microbatch, parts in enumerate(used[rank]):
                model.require_backward_grad_sync = microbatch == 1
                model(batch(rank, 10 * step + microbatch), parts).backward()
            optimizer.step()

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        module = Parts()
        model = DistributedDataParallel(module, config(bucket_size=1, static_graph=static), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.01, 0.9, weight_decay=0.1), model)
        train(rank, model, optimizer)
        return [param.detach().clone() for param in module.parameters()]

    def reference(rank: int, group: ProcessGroup) -> list[Tensor]:
        module = Parts()
        # all microbatches of a step as one forward, so that torch's search finds all that is used
        model = TorchDDP(module, process_group=group, find_unused_parameters=True)
        optimizer = torch.optim.SGD(module.parameters(), 0.01, 0.9, weight_decay=0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.stack([batch(rank, 10 * step + microbatch) for microbatch in range(2)])
            model(x, used[rank]).backward()
            optimizer.step()
        return [param.detach().clone() for param in module.parameters()]

    def each_part_of_its_microbatch(self: Parts, x: Tensor, used: list[tuple[int, ...]]) -> Tensor:
        if isinstance(used, tuple):
            return own_forward(self, x, used)
        return sum(own_forward(self, part_x, part_used) for part_x, part_used in zip(x, used, strict=True))  # type: ignore[return-value]

    own_forward = Parts.forward
    ours = run_ranks(2, run)
    Parts.forward = each_part_of_its_microbatch  # type: ignore[method-assign, assignment]
    try:
        expected = run_ranks(2, reference)
    finally:
        Parts.forward = own_forward  # type: ignore[method-assign]
    assert_equal(ours, expected, 1e-6)
    assert torch.equal(ours[0][6], Parts().parts[3].weight), "used by no rank"
    assert not torch.equal(ours[0][4], Parts().parts[2].weight), "used by rank 1"


def test_failed_backward_leaves_nothing_in_sums() -> None:
    """Nor in the staging buffers, with buckets on the wire; earlier gradients of the window are dropped with it."""

    def broken(model: Any, rank: int) -> None:
        half(model, rank, 7, sync=False)

        def fail(grad: Tensor) -> None:
            raise ZeroDivisionError("on purpose")

        hook = model.module[0].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            half(model, rank, 8)
        hook.remove()
        half(model, rank, 0)

    def whole(model: Any, rank: int) -> None:
        half(model, rank, 0)

    for bucket_size in (1, 10**9):
        ours = grads_with_ours(two_layers, broken, **POOLED, bucket_size=bucket_size)
        assert_equal(ours, grads_with_ddp(two_layers, whole))
