"""Copies of a device's state in host memory, through pinned memory, with a device that copies when it is waited for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import devices, to_host
from megastrategy.core.states import host_copies
from megastrategy.core.states.flat_shard import FlatShard
from tests.support import lazy_device
from tests.support.budgets import work_as_on_an_accelerator
from tests.support.lazy_device import LazyDevice
from tests.support.models import two_layers
from tests.support.ranks import run_ranks
from tests.support.thread_mode import ThreadMode


class LazyCopies(ThreadMode):
    """Carries out copies without a wait when the device is synchronised."""

    def __init__(self) -> None:
        super().__init__()
        self._queued: list[Callable[[], object]] = []
        self.num_waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (*args[2:], False)[0]:
            target, source = args[:2]
            target.fill_(99)
            self._queued.append(lambda: func(target, source))
            return target
        return func(*args, **(kwargs or {}))

    def synchronize(self, device: Any = None) -> None:
        self.num_waits += 1
        for copy in self._queued:
            copy()
        self._queued.clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyCopies]:
    work_as_on_an_accelerator(monkeypatch)
    monkeypatch.setattr(host_copies, "PINNED_BYTES", 256)
    lazy = LazyCopies()
    monkeypatch.setattr(torch.cpu, "synchronize", lazy.synchronize)
    with lazy:
        yield lazy


def state() -> dict[str, Any]:
    return {
        "weights": [torch.arange(float(n)) for n in (1, 3, 7, 0, 20, 64, 63)],
        "large": torch.arange(1000.0).view(10, 100),  # of several times the pinned memory
        "counts": (torch.tensor(3), torch.tensor([True, False]), torch.tensor([1 + 2j])),
        "bf16": torch.arange(33.0).bfloat16(),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "shard": FlatShard(torch.arange(5.0), 2, (4, 3), (3, 1)),
        "text": ["x", OrderedDict(a=1)],
    }


def tensors(of: Any) -> list[Tensor]:
    if isinstance(of, FlatShard):
        return [of.local]
    if isinstance(of, Tensor):
        return [of]
    values = list(of.values()) if isinstance(of, dict) else list(of) if isinstance(of, list | tuple) else []
    return [tensor for value in values for tensor in tensors(value)]


def test_host_copies_have_every_element(device: LazyCopies) -> None:
    original, expected = state(), state()
    copied = to_host(original)
    for tensor in tensors(original):
        tensor.zero_()
    assert len(tensors(copied)) == len(tensors(expected)) == 14
    for ours, theirs in zip(tensors(copied), tensors(expected), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
    assert copied["text"] == expected["text"]
    assert isinstance(copied["counts"], tuple)
    assert (copied["shard"].start, tuple(copied["shard"].shape)) == (2, (4, 3))


def test_the_device_is_waited_for_once_a_filling(device: LazyCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    real = devices.pinned_memory
    monkeypatch.setattr(devices, "pinned_memory", lambda *arguments: pinned.append(arguments) or real(*arguments))
    to_host([torch.ones(4) for _ in range(160)])  # of 16 bytes each, and 128 fit into a half
    assert device.num_waits == 20
    assert len(pinned) == 1


class Streamed(LazyCopies):
    """The same copies on a stream, waited for by events; notes what is queued behind an event that is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.device = LazyDevice(lazy_caller=True)
        self.num_queued_behind: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        while self._queued:
            self.device.caller.queue(self._queued.pop())
        return made

    def Event(self) -> Any:  # noqa: N802 - its name in torch
        caller, behind = self.device.caller, self.num_queued_behind

        class Noted(lazy_device.Event):
            def synchronize(self) -> None:
                behind.append(caller.length - self._length)
                super().synchronize()

        return Noted()


def test_device_and_host_alternate_halves(device: LazyCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed, original = Streamed(), [torch.full((4,), float(number)) for number in range(36)]
    streams = SimpleNamespace(Event=streamed.Event, current_stream=streamed.device.current_stream)
    monkeypatch.setattr(devices, "streams_of", lambda _: streams)
    with streamed:
        copied = to_host(original)
    assert all(map(torch.equal, copied, original))
    # 8 tensors a half, 36 in all: while a half is emptied the copies of the next are queued, until there is none.
    assert streamed.num_queued_behind == [8, 8, 8, 4, 0]
    assert device.num_waits == 0, "the device's other streams are not waited for"


def gathered() -> list[Tensor]:
    """Rank 0's gathered tensors after a step of Adam with weights in bf16: state of three buckets, and main params."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        config = DistributedDataParallelConfig(bucket_size=200)
        model = DistributedDataParallel(two_layers().bfloat16(), config, group)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        model(torch.full((4, 10), rank + 0.5).bfloat16()).square().sum().backward()
        optimizer.step()
        found = [*optimizer.state_dict()["state"].values(), optimizer.main_params()]
        model.close()
        return tensors(found)

    return run_ranks(2, run)[0]


def test_gather_by_pinned_memory_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, pinned = gathered(), []
    work_as_on_an_accelerator(monkeypatch)
    real = devices.pinned_memory
    monkeypatch.setattr(devices, "pinned_memory", lambda *arguments: pinned.append(arguments) or real(*arguments))
    ours = gathered()
    assert len(ours) == len(expected) == 16
    assert all(map(torch.equal, ours, expected))
    assert len(pinned) >= 2, "for the state, and for the main params"
