"""Rings and broadcasts against plain sums, and the effect of a rank that ends on the others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core.collectives import BackendCollectives, Collectives, GlooCollectives, make_collectives
from megastrategy.core.collectives.gloo_rings import SEGMENT_BYTES
from megastrategy.core.errors import CollectiveError
from megastrategy.core.layout.layout import Spans
from tests.support.budgets import Operations
from tests.support.doubles import FailingCollectives, RecordingCollectives
from tests.support.ranks import run_ranks, try_ranks

CPU = torch.device("cpu")


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers, so that sums are exact in every order and dtype."""
    return torch.randint(-8, 9, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, torch.float32), (5, torch.float32), (2, torch.bfloat16), (3, torch.float16), (4, torch.float64)],
)
def test_reduce_scatter_all_gather_all_reduce(size: int, dtype: torch.dtype) -> None:
    numel = 12 * size

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = make_collectives(group, CPU)
        total = torch.stack([values(r, numel, dtype) for r in range(size)]).sum(0)
        own = slice(rank * 12, (rank + 1) * 12)
        for _ in range(3):  # scratch and readiness words are used again
            scattered = values(rank, numel, dtype)
            collectives.reduce_scatter(scattered, 0.5).wait()
            assert torch.equal(scattered[own], total[own] * 0.5)
            gathered = torch.full((numel,), -1, dtype=dtype)
            gathered[own] = total[own]
            collectives.all_gather(gathered).wait()
            assert torch.equal(gathered, total)
            reduced = values(rank, numel, dtype)
            collectives.all_reduce(reduced, 0.5).wait()
            assert torch.equal(reduced, total * 0.5)
        largest = torch.tensor([rank, -rank], dtype=torch.float32)
        collectives.all_reduce_max(largest).wait()
        assert largest.tolist() == [size - 1, 0]
        collectives.close()

    run_ranks(size, run)


@pytest.mark.parametrize("size", [2, 3])
def test_large_tensors_go_in_segments(size: int) -> None:
    """The last of them short; every element has another value than its neighbours in other segments."""
    numel = 2 * (SEGMENT_BYTES // 4) + 5

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = make_collectives(group, CPU)
        total = torch.stack([values(r, size * numel) for r in range(size)]).sum(0)
        own = slice(rank * numel, (rank + 1) * numel)
        scattered = values(rank, size * numel)
        handles = [collectives.reduce_scatter(scattered, 0.5)]
        sums = torch.ones(numel)
        sent = values(rank, size * numel)  # kept until it has been waited for, as everything that is sent
        handles.append(collectives.reduce_scatter_into(sums, sent, 0.5))
        gathered = torch.zeros(size * numel)
        gathered[own] = total[own]
        handles.append(collectives.all_gather(gathered))
        for handle in handles:
            handle.wait()
        assert torch.equal(scattered[own], total[own] * 0.5)
        assert torch.equal(sums, total[own] * 0.5 + 1)
        assert torch.equal(gathered, total)
        collectives.close()

    run_ranks(size, run)


@pytest.mark.parametrize(
    ("size", "dtype", "kind"),
    [
        (2, torch.bfloat16, GlooCollectives),
        (3, torch.float16, BackendCollectives),
        (4, torch.bfloat16, GlooCollectives),
    ],
)
def test_16_bits_are_summed_in_fp32_in_rank_order(size: int, dtype: torch.dtype, kind: type[Collectives]) -> None:
    """Numbers of very different sizes, so that another order or a rounding in between would show."""
    numel, scale = 70_000, 1 / size

    def addends(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        exponents = torch.randint(-8, 9, (size * numel,), generator=generator)
        return (torch.randn(size * numel, generator=generator) * 2.0**exponents).to(dtype)

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = kind(group)
        own = slice(rank * numel, (rank + 1) * numel)
        sums = torch.full((numel,), 0.1)
        for _ in range(2):
            expected = torch.zeros(numel)
            for other in range(size):
                part = addends(other)[own].float()
                expected += part * scale
            expected = sums + expected
            handle = collectives.reduce_scatter_into(sums, addends(rank), scale)
            handle.wait()
            handle.wait()
            assert torch.equal(sums, expected)
        collectives.close()

    run_ranks(size, run)


@pytest.mark.parametrize("size", [1, 3])
def test_broadcast_of_many_tensors_and_gather_of_bytes(size: int) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        collectives = make_collectives(group, CPU)
        tensors = [
            torch.full((2, 3), float(rank)),
            torch.tensor(rank),
            torch.full((4, 3, 2, 2), float(rank)).to(memory_format=torch.channels_last),
            torch.zeros(0),
            torch.tensor([True, False]) if rank == 0 else torch.tensor([False, False]),
            torch.full((5,), rank, dtype=torch.int64),
            torch.full((2,), float(rank), dtype=torch.bfloat16),
        ]
        collectives.broadcast_all(tensors)
        assert not any(tensor.any() for i, tensor in enumerate(tensors) if i != 4)
        assert tensors[4].tolist() == [True, False]
        assert collectives.all_gather_bytes(b"x" * rank) == [b"x" * r for r in range(size)]
        assert collectives.all_gather_objects({"rank": rank}) == [{"rank": r} for r in range(size)]
        collectives.close()

    run_ranks(size, run)


@pytest.mark.real_collectives("is about gloo's thread")
def test_close_ends_the_thread_and_may_be_repeated() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        collectives = make_collectives(group, CPU)
        assert isinstance(collectives, GlooCollectives)
        for _ in range(2):
            collectives.broadcast(torch.ones(1)).wait()
            collectives.close()
            collectives.close()

    before = set(threading.enumerate())  # ranks of other tests that ended in an error may not be collected yet
    run_ranks(2, run)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "megastrategy-gloo"]


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather", "all_reduce", "broadcast"])
def test_ended_rank_ends_collectives_of_others(name: str) -> None:
    """Long before the timeout of the group."""

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = make_collectives(group, CPU)
        tensor = torch.ones(4)
        collectives.all_reduce(tensor, 1.0).wait()
        if rank == 1:
            collectives.close()
            raise ZeroDivisionError("this rank ends")
        scale = (1.0,) if name in ("reduce_scatter", "all_reduce") else ()
        try:
            for _ in range(100):  # a broadcast's sender may be ahead of the receiver by the size of the socket
                tensor = torch.ones(2**20)
                getattr(collectives, name)(tensor, *scale).wait()
        finally:
            collectives.close()

    start = time.monotonic()
    survivor, ended = try_ranks(2, run, timeout_s=60)
    assert time.monotonic() - start < 30
    assert isinstance(ended, ZeroDivisionError)
    assert isinstance(survivor, CollectiveError)
    assert "rank 0 of 2" in str(survivor)
    assert "another rank ended" in str(survivor)


def test_hanging_rank_ends_others_at_timeout() -> None:
    release = threading.Event()

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = make_collectives(group, CPU)
        tensor = torch.ones(4)
        collectives.all_reduce(tensor, 1.0).wait()
        if rank == 1:
            release.wait(30)
            return
        try:
            collectives.reduce_scatter(tensor, 1.0).wait()
        finally:
            release.set()
            collectives.close()

    start = time.monotonic()
    survivor, _ = try_ranks(2, run, timeout_s=2)
    assert 1 < time.monotonic() - start < 20
    assert isinstance(survivor, CollectiveError)


@pytest.mark.real_collectives("the memory of one that was not begun is undefined, but on the host")
def test_no_collective_begins_after_a_failed_one() -> None:
    """Or this rank waits in it for others, who wait for it in the one that failed."""

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = FailingCollectives(group)
        tensor = torch.ones(4)
        collectives.all_reduce(tensor, 1.0).wait()
        collectives.fail_at(1, on_the_wire=True)
        failing = collectives.all_reduce(tensor, 1.0)
        collectives.fail_at(0)
        following = torch.ones(4)
        handle = collectives.all_reduce(following, 1.0)
        for failed in (handle, failing):
            with pytest.raises(CollectiveError, match="out of luck"):
                failed.wait()
        assert following.tolist() == [1.0] * 4, "not begun"
        collectives.close()
        collectives.all_reduce(following, 1.0).wait()
        assert following.tolist() == [2.0] * 4
        collectives.close()

    run_ranks(2, run)


# --- a device's backend, on the host ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_complex_numbers_go_as_pairs_of_real_ones(size: int) -> None:
    """No backend of a device has them all. The bits are those of the rings, which add complex numbers as such."""

    def run(rank: int, group: ProcessGroup, kind: type[Collectives]) -> list[Tensor]:
        collectives = kind(group)
        mine = torch.complex(values(rank, 8 * size), values(rank + 10, 8 * size))
        own = slice(rank * 8, (rank + 1) * 8)
        results = [mine.clone(), mine.clone(), torch.zeros_like(mine), mine.clone()]
        sums = torch.ones(8, dtype=mine.dtype)
        results[2][own] = mine[own]
        for handle in (
            collectives.all_reduce(results[0], 0.5),
            collectives.reduce_scatter(results[1], 0.5),
            collectives.all_gather(results[2]),
            collectives.broadcast(results[3]),
            collectives.reduce_scatter_into(sums, mine.clone(), 0.5),
        ):
            handle.wait()
        collectives.close()
        return [results[0], results[1][own], *results[2:], sums]

    for of_backend, of_rings in zip(
        run_ranks(size, lambda rank, group: run(rank, group, BackendCollectives)),
        run_ranks(size, lambda rank, group: run(rank, group, GlooCollectives)),
        strict=True,
    ):
        assert all(map(torch.equal, of_backend, of_rings))


def test_broadcast_operations_do_not_grow_with_tensors() -> None:
    """A module has hundreds of small buffers, and before each forward they are broadcast."""

    def run(rank: int, group: ProcessGroup) -> list[int]:
        collectives, counts = BackendCollectives(group), []
        for number in (2, 50):
            tensors = [torch.full((3, i), float(rank + i)) for i in range(1, number + 1)]
            with Operations() as operations:
                collectives.broadcast_all(tensors)
            assert all(torch.equal(tensor, torch.full_like(tensor, i)) for i, tensor in enumerate(tensors, 1))
            counts.append(operations.total)
        return counts

    for few, many in run_ranks(2, run):
        assert many == few


@pytest.mark.parametrize("what", ["all_reduce", "all_gather"])
def test_backend_refusing_to_start_raises(what: str) -> None:
    """NCCL connects at the first collective, and reports an aborted communicator at the next one."""

    class Refuses:
        def __getattr__(self, name: str) -> object:
            def refuse(*_: object) -> None:
                raise dist.DistBackendError("communicator was aborted")

            return refuse

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = BackendCollectives(group)
        collectives.group = Refuses()  # type: ignore[assignment]
        scale = [0.5] if what == "all_reduce" else []
        with pytest.raises(CollectiveError, match=r"rank \d of 2: .*look at the first error.*communicator was aborted"):
            getattr(collectives, what)(torch.ones(4), *scale)
        assert collectives.progress.num_started == 0

    run_ranks(2, run)


# Parts of a tensor of any size: gathered, and sent to each other.


NUMEL = 1000


def cut_at_random(size: int, seed: int, numel: int = NUMEL) -> Spans:
    """Who has which elements: gaps, spans of one element, ranks without any."""
    generator = random.Random(seed)
    ends = sorted(generator.sample(range(numel + 1), 24))
    spans: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    having = generator.sample(range(size), generator.randint(1, size))
    for start, end in zip(ends[:-1:2], ends[1::2], strict=True):
        spans[generator.choice(having)].append((start, end))
    return spans


KINDS: dict[str, Callable[[ProcessGroup], Collectives]] = {
    "rings": GlooCollectives,
    "backend": BackendCollectives,
    "recording": RecordingCollectives,
}

each_kind = pytest.mark.parametrize(
    ("kind", "size", "dtype"),
    [
        ("rings", 1, torch.float32),
        ("rings", 4, torch.float32),
        ("rings", 5, torch.float32),
        ("backend", 2, torch.bfloat16),
        ("recording", 3, torch.complex64),
    ],
)


def element(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Other numbers on each rank, exact in every dtype."""
    return ((torch.arange(numel) + 31 * rank) % 100).to(dtype)


@each_kind
def test_gather_of_spans(kind: str, size: int, dtype: torch.dtype) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        collectives = KINDS[kind](group)
        for seed in range(4):
            spans = cut_at_random(size, seed)
            tensor = element(rank, NUMEL, dtype)
            expected = tensor.clone()
            for other, of_rank in enumerate(spans):
                for start, end in of_rank:
                    expected[start:end] = element(other, NUMEL, dtype)[start:end]
            collectives.gather_spans(tensor, spans).wait()
            assert torch.equal(tensor, expected)
        nothing = element(rank, NUMEL, dtype)
        collectives.gather_spans(nothing, [[] for _ in range(size)]).wait()
        assert torch.equal(nothing, element(rank, NUMEL, dtype))
        collectives.close()

    run_ranks(size, run)


@each_kind
def test_all_to_all(kind: str, size: int, dtype: torch.dtype) -> None:
    """Every rank's part for each rank; many of them are empty."""

    def sizes(source: int, seed: int) -> list[int]:
        generator = random.Random(f"{source} {seed}")
        return [0 if to == source or generator.random() < 0.4 else generator.randint(1, 300) for to in range(size)]

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = KINDS[kind](group)
        for seed in range(4):
            sent = element(rank, sum(sizes(rank, seed)), dtype)
            coming = [sizes(source, seed)[rank] for source in range(size)]
            received = torch.zeros(sum(coming), dtype=dtype)
            collectives.all_to_all(received, sent, coming, sizes(rank, seed)).wait()
            expected = [
                element(source, sum(sizes(source, seed)), dtype).split(sizes(source, seed))[rank]
                for source in range(size)
            ]
            assert torch.equal(received, torch.cat(expected))
        collectives.close()

    run_ranks(size, run)
