"""grad_buffer="pooled": its memory, the order of its collectives, and the bits of persistent buffers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.collectives import Handle
from megastrategy.core.events import Event, EventKind
from megastrategy.core.layout.memory import memory_use
from tests.support.doubles import DelayingCollectives, RecordingCollectives
from tests.support.gradients import assert_equal, assert_stands_in, batch
from tests.support.pooled import config, one_large
from tests.support.ranks import run_ranks
from tests.support.training import (
    Run,
    assert_same_bits,
    train_with_ddp,
    train_with_ours,
)

# --- memory ----------------------------------------------------------------------------------------------------------


class Watching(RecordingCollectives):
    """Knows which memory of sent tensors is still in use, and how much it is."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self._sent: dict[StorageWeakRef, int] = {}
        self.peak_nbytes = 0
        self.unfinished: list[bool] = []
        self.most_unfinished = 0

    def alive_nbytes(self, *, in_the_end: bool = False) -> int:
        """``in_the_end``: when gloo's thread has released the tensors of a complete collective; soon, if ever."""
        deadline = time.monotonic() + 10.0
        while in_the_end and self.alive_nbytes() > 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        return sum(nbytes for storage, nbytes in self._sent.items() if not storage.expired())

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        storage = tensor.untyped_storage()
        self._sent[StorageWeakRef(storage)] = storage.nbytes()
        self.peak_nbytes = max(self.peak_nbytes, self.alive_nbytes())
        number = len(self.unfinished)
        self.unfinished.append(True)
        self.most_unfinished = max(self.most_unfinished, sum(self.unfinished))
        handle = super().reduce_scatter_into(sums, tensor, scale)
        wait = handle.wait

        def waited() -> None:
            wait()
            self.unfinished[number] = False

        handle.wait = waited  # type: ignore[method-assign]
        return handle


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_huge_param_is_staged_in_pieces(size: int, dtype: torch.dtype) -> None:
    """At most two of them are in flight, none is left after backward, and nothing refers to a gradient."""

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = Watching(group)
        model = DistributedDataParallel(one_large(dtype), config(bucket_size=1000), collectives=collectives)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        piece_numel = -(-1000 // (128 * size)) * 128 * size if size != 2 else 1024
        for number in range(2):
            collectives.calls.clear()
            model(batch(rank, number).to(dtype)).square().sum().backward()
            sent = [call.numel for call in collectives.named("reduce_scatter_into")]
            assert sum(sent) == sum(bucket.numel for bucket in model.layout.buckets), "each element once"
            assert max(sent) <= piece_numel < max(bucket.numel for bucket in model.layout.buckets) // 7
            assert collectives.alive_nbytes(in_the_end=True) == 0
            for param in model.parameters():
                assert_stands_in(param)
            optimizer.step()
            optimizer.zero_grad()
        use = memory_use(model.layout, rank, 2)
        assert collectives.peak_nbytes == use.staging_bytes == 2 * max(sent) * 4
        assert collectives.most_unfinished == 2
        model.close()

    run_ranks(size, run)


# --- collectives -----------------------------------------------------------------------------------------------------


class EitherOrder(nn.Module):
    """Branches that rank 1 runs in the opposite order, registered in neither."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.branches = nn.ModuleList(nn.Linear(17, 17) for _ in order)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.3
        self._order = order

    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.tanh(self.branches[number](x)).square().sum() for number in self._order)  # type: ignore[return-value]


@pytest.mark.parametrize("delay_s", [0.0, 0.003])
def test_pooled_grads_arrive_in_other_orders(delay_s: float) -> None:
    """With the pool full most of the time, so that ranks wait in backward, each at another place."""
    orders = [[2, 0, 3, 1], [1, 3, 0, 2]]

    def run(rank: int, group: ProcessGroup) -> list[Any]:
        module = EitherOrder(orders[rank])
        events: list[Event] = []
        collectives = DelayingCollectives(group, delay_s)
        model = DistributedDataParallel(module, config(bucket_size=1), collectives=collectives, listener=events.append)
        model(torch.full((3, 17), 0.1 * (rank + 1))).backward()
        starts = [event.index for event in events if event.kind is EventKind.REDUCE_START]
        assert starts == list(range(len(model.layout.buckets)))
        grads = [model.full_grad(param) for param in module.parameters()]
        model.close()
        return grads

    def reference(rank: int, group: ProcessGroup) -> list[Any]:
        module = EitherOrder(orders[rank])
        model = TorchDDP(module, process_group=group)
        model(torch.full((3, 17), 0.1 * (rank + 1))).backward()
        return [param.grad for param in module.parameters()]

    assert_equal(run_ranks(2, run), run_ranks(2, reference))


# --- training ---------------------------------------------------------------------------------------------------------


def test_pooled_has_bits_of_persistent_buffers() -> None:
    """With sums in the order of the ranks."""
    fp32_sums = {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False}
    run = Run(options=(("lr", 0.01), ("eps", 1e-4)), groups=3)
    assert_same_bits(train_with_ours(run, 2, config()), train_with_ddp(run, 2))
    in_bf16 = Run(groups=3, dtype=torch.bfloat16)
    contiguous = train_with_ours(in_bf16, 2, DistributedDataParallelConfig(bucket_size=200, **fp32_sums))
    for options in (fp32_sums, {"grad_reduce_in_fp32": False}):
        assert_same_bits(train_with_ours(in_bf16, 2, config(**options)), contiguous)
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
