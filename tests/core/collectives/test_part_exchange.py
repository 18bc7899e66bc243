"""Parts that ranks exchange and add up themselves: the sums, the order of streams, and the receive buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig
from megastrategy.core import memory_use
from megastrategy.core.collectives import BackendCollectives, GlooCollectives
from megastrategy.core.collectives.part_exchange import PartExchange
from megastrategy.core.collectives.part_sums import add_parts_
from megastrategy.core.layout.layout import NUM_RECEIVE_BUFFERS
from tests.support.budgets import work_as_on_an_accelerator
from tests.support.lazy_device import LazyDevice, Stream
from tests.support.ranks import run_ranks

HOST = torch.device("cpu")
SCALE = 0.25


class Wire:
    """Carries exchanges out on a stream of its own, as NCCL does: behind the one from which they are launched, which
    goes on, and is put behind it by ``wait()``."""

    def __init__(self, device: LazyDevice) -> None:
        self._device, self._stream = device, device.Stream(HOST)
        self.alive: list[StorageWeakRef] = []
        self.most_alive = 0

    def all_to_all(self, received: Tensor, tensor: Tensor) -> Work:
        launcher = self._device.current_stream(None)
        self._stream.wait_stream(launcher)
        self._stream.queue(lambda: received.copy_(came_of(tensor)))
        refs = {StorageWeakRef(received.untyped_storage()).cdata: StorageWeakRef(received.untyped_storage())}
        refs |= {ref.cdata: ref for ref in self.alive if not ref.expired()}
        self.alive = list(refs.values())
        self.most_alive = max(self.most_alive, len(self.alive))
        return Work(self._stream, launcher)


class Work:
    def __init__(self, stream: Stream, launcher: Stream) -> None:
        self._stream, self._launcher, self._length = stream, launcher, stream.length

    def wait(self) -> None:
        self._launcher.queue(lambda: self._stream.run(self._length))


def came_of(tensor: Tensor) -> Tensor:
    """Returns values that another rank might send."""
    return tensor * 3 + 1


def exchange_all(device: LazyDevice, wire: Wire, numbers: range, size: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Returns, for each number, the sums and the expected sums. All are started before any is waited for."""
    exchange = PartExchange(HOST, wire.all_to_all, device)
    started, results = [], []
    for number in numbers:
        tensor, sums = torch.full((8 * size,), torch.nan, dtype=torch.bfloat16), torch.ones(8)
        values = torch.arange(8.0 * size).add(number).bfloat16()
        device.write(tensor, values)
        expected = torch.ones(8)
        add_parts_(expected, came_of(values).chunk(size), SCALE)
        results.append((sums, expected))
        add = adding(sums)
        started.append(exchange.start(tensor, add, size))
        device.write(values, torch.zeros_like(values))  # later on the caller's stream: nothing reads it any more
    for one in started:
        exchange.finish(one)
    device.synchronize()
    return results


def adding(sums: Tensor) -> Callable[[Sequence[Tensor]], None]:
    return lambda parts: add_parts_(sums, parts, SCALE)


@pytest.mark.parametrize("early", [False, True])
def test_part_sums_are_right_on_any_stream(early: bool) -> None:
    device = LazyDevice(lazy_caller=True, early=early)
    wire = Wire(device)
    for sums, expected in exchange_all(device, wire, range(7)):
        assert torch.equal(sums, expected)


def test_there_is_memory_for_two_and_none_afterwards() -> None:
    device = LazyDevice(lazy_caller=True)
    wire = Wire(device)
    exchange_all(device, wire, range(7))
    assert wire.most_alive == 2
    assert all(ref.expired() for ref in wire.alive)


class Watching(BackendCollectives):
    """Keeps the most bytes that were there at a time for what other ranks send."""

    most_nbytes = 0

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def _all_to_all(self, received: Tensor, tensor: Tensor) -> Any:
        storage = received.untyped_storage()
        self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._wait_until_alive(NUM_RECEIVE_BUFFERS)
        self.most_nbytes = max(self.most_nbytes, sum(nbytes for _, nbytes in self._alive.values()))
        return super()._all_to_all(received, tensor)

    def nbytes_now(self) -> int:
        self._wait_until_alive(0)
        return sum(nbytes for _, nbytes in self._alive.values())

    def _wait_until_alive(self, count: int) -> None:
        """For 5 s at most: a thread of gloo's lets go a little after the exchange has ended, later when busy."""
        deadline = time.monotonic() + 5.0
        while True:
            self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
            if len(self._alive) <= count or time.monotonic() > deadline:
                return
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("size", "options"), [(2, {"reduce_scatter_with_fp32_accumulation": True}), (3, {"grad_buffer": "pooled"})], ids=str
)
def test_a_backward_uses_the_memory_of_the_table(size: int, options: dict[str, Any]) -> None:
    """Whatever number of buckets is in flight, of weights in bf16; and the gradients are the rings' to the bit."""

    def run(rank: int, group: ProcessGroup) -> None:
        found = []
        config = DistributedDataParallelConfig(bucket_size=9000, grad_reduce_in_fp32=False, **options)
        for kind in (Watching, GlooCollectives):
            collectives = kind(group)
            net = nn.Sequential(*(nn.Linear(100, 100) for _ in range(6)), nn.Linear(100, 90)).bfloat16()
            with torch.no_grad():
                for number, param in enumerate(net.parameters()):
                    param.copy_(torch.arange(param.numel()).view(param.shape).mul(number + 1).sin())
            model = DistributedDataParallel(net, config, collectives=collectives)
            assert sum(len(model.layout.pieces(bucket)) for bucket in model.layout.buckets) > 5
            for number in range(2):
                model(torch.full((3, 100), rank + number + 0.5).bfloat16()).square().sum().backward()
            found.append([model.full_grad(param) for param in model.parameters()])
            use = memory_use(model.layout, rank, 2)
            assert use.received_bytes > 2**14, "and not 0.00"
            if isinstance(collectives, Watching):
                # Two, and neither has to be as large as the largest.
                assert use.received_bytes / 2 < collectives.most_nbytes <= use.received_bytes
                assert collectives.nbytes_now() == 0
            model.close()
            collectives.close()
        for ours, rings in zip(*found, strict=True):
            assert torch.equal(ours, rings)

    run_ranks(size, run)


# Sums over ranks: the same bits in pieces that stay in a core's cache and in a few kernels, which are counted.

PIECE_NUMEL = 2**16  # of the host's path: more elements than that are added in several goes
DTYPES = {
    "bf16 into fp32": (torch.bfloat16, torch.float32),
    "fp16 into fp32": (torch.float16, torch.float32),
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
    "complex64": (torch.complex64, torch.complex64),
}


def parts_and_sums(dtypes: tuple[torch.dtype, torch.dtype], num_parts: int, numel: int) -> tuple[list[Tensor], Tensor]:
    """All magnitudes of 16 bits, including the smallest: rounding twice shows in some of them."""
    generator = torch.Generator().manual_seed(3)

    def draw(dtype: torch.dtype) -> Tensor:
        exponents = torch.randint(-24, 15, (numel,), generator=generator).double()
        real = torch.randn(numel, dtype=torch.float64, generator=generator) * 2**exponents
        return (torch.complex(real, real.flip(0)) if dtype.is_complex else real).to(dtype)

    return [draw(dtypes[0]) for _ in range(num_parts)], draw(dtypes[1])


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        ("bf16 into fp32", 1.0),
        ("fp16 into fp32", 0.5),
        ("fp32", 1 / 3),
        ("fp64", 0.125),
        ("complex64", 1.0),
    ],
)
def test_an_accelerator_has_the_hosts_bits(kind: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for numel in (PIECE_NUMEL + 5, 0):
        parts, expected = parts_and_sums(DTYPES[kind], 3, numel)
        sums, copies = expected.clone(), [part.clone() for part in parts]
        add_parts_(expected, copies, scale)
        results.append((parts, sums, expected))
    work_as_on_an_accelerator(monkeypatch)
    for parts, sums, expected in results:
        add_parts_(sums, parts, scale)
        assert torch.equal(sums, expected)
