"""grad_buffer="pooled": its memory, its collectives, and their order."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.core.collectives import Handle
from megastrategy.core.errors import CollectiveError
from megastrategy.core.events import Event, EventKind
from megastrategy.core.layout.memory import memory_use
from tests.support.data_path import memory_of, state_bytes_of
from tests.support.doubles import DelayingCollectives, RecordingCollectives
from tests.support.gradients import assert_equal, assert_stands_in, batch
from tests.support.models import awkward_model, images
from tests.support.pooled import config, one_large
from tests.support.ranks import run_ranks, try_ranks
from tests.support.training import Run

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


@pytest.mark.parametrize("size", [2, 3])
def test_memory_is_2_and_16_over_d_bytes_a_parameter(size: int) -> None:
    """With bf16 weights and Adam, except for the padding of buckets; the sums are all that is held of gradients."""

    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(one_large(torch.bfloat16), config(bucket_size=1000), group)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        for number in range(2):
            with model.no_sync():
                model(batch(rank, number).bfloat16()).square().sum().backward()
            model(batch(rank, number + 5).bfloat16()).square().sum().backward()
            optimizer.step()
        padded = sum(buffer.numel for buffer in model.layout.buffers)
        use = memory_use(model.layout, rank, 2)
        assert use.grad_bytes == sum(tensor.nbytes for tensor in memory_of(model)[1]) == 4 * padded // size
        assert use.total_bytes == 2 * padded + 4 * padded // size + state_bytes_of(optimizer)
        numel = sum(param.numel() for param in model.parameters())
        assert use.total_bytes < (2 + 16 / size) * numel * 1.25, "of which a quarter is padding at most"
        model.close()

    run_ranks(size, run)


# --- collectives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_microbatches_reduce_each_bucket_in_order(overlap: bool) -> None:
    """Counted by events; module buffers are broadcast when torch DDP would, not in every microbatch."""

    def run(rank: int, group: ProcessGroup) -> None:
        events: list[Event] = []
        collectives = RecordingCollectives(group)
        model = DistributedDataParallel(
            awkward_model(), config(overlap_grad_reduce=overlap), collectives=collectives, listener=events.append
        )
        optimizer = DistributedOptimizer(Run().make_optimizer(model), model)
        model(images(rank, 9, 9), 9, rank).backward()  # in which the buckets take the order that is seen
        optimizer.step()
        optimizer.zero_grad()
        every = list(range(len(model.layout.buckets)))
        for step in range(2):
            broadcasts = []
            for microbatch in range(3):
                events.clear(), collectives.calls.clear()  # type: ignore[func-returns-value]
                model.require_backward_grad_sync = microbatch == 2
                model(images(rank, step, microbatch), step, rank).backward()
                for kind in (EventKind.REDUCE_START, EventKind.REDUCE_END):
                    assert [event.index for event in events if event.kind is kind] == every
                assert [event.index for event in events if event.kind is EventKind.BACKWARD_END] == [1]
                pieces = sum(len(model.layout.pieces(bucket)) for bucket in model.layout.buckets)
                assert len(collectives.named("reduce_scatter_into")) == pieces > len(every)
                for param in model.parameters():
                    assert_stands_in(param, param.grad is not None)
                broadcasts.append(len(collectives.named("broadcast")))
            optimizer.step()
            optimizer.zero_grad()
            assert broadcasts == [2, 0, 0], "the statistics, and their counter"
        model.close()

    run_ranks(2, run)


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


def test_failing_reduction_ends_backward_on_all_ranks() -> None:
    """Rank 1 dies in its backward; rank 0 waits for a staging buffer there, and does not wait for ever."""
    died = threading.Event()

    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(one_large(), config(bucket_size=300), group)
        model(batch(rank)).sum().backward()
        if rank == 1:

            def die(grad: Tensor) -> None:
                died.set()
                raise ZeroDivisionError("on purpose")

            model.module[4].weight.register_hook(die)
        model(batch(rank)).sum().backward()

    waiting, dead = try_ranks(2, run, timeout_s=10)
    assert died.is_set()
    assert isinstance(dead, ZeroDivisionError)
    assert isinstance(waiting, CollectiveError)
    assert "reduce-scatter did not complete" in str(waiting)
    assert any("_wait_for_oldest" in note for note in waiting.__notes__), "it waited inside backward"
