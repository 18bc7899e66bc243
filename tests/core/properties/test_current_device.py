"""The current device need not be the model's: a script that calls no ``set_device`` has the first one on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core.collectives import BackendCollectives, Handle, SingleRankCollectives
from megastrategy.core.collectives.instanced import InstanceCollectives
from megastrategy.core.collectives.single_rank import Done
from megastrategy.core.judge.isolation import isolated
from tests.support.lazy_device import Event, LazyDevice, Stream
from tests.support.ranks import run_ranks


class _OneDeviceOfTwo(LazyDevice):
    """The tensors are another device's than the current one, which has a stream of its own."""

    def __init__(self) -> None:
        super().__init__(lazy_caller=True)
        of_current, two = Stream(self._lock), self

        class OfTwo(Event):
            def wait(self, stream: Stream | None = None) -> None:
                super().wait(of_current if stream is None else stream)

        two.Event = OfTwo


class _Hop(SingleRankCollectives):
    """A hop that is work of the stream."""

    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        tensor.mul_(scale).add_(1.0)
        return Done()


def test_sums_of_instances_are_waited_for_on_the_stream_of_the_models_device() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        device = _OneDeviceOfTwo()
        every = BackendCollectives(group)
        instance = InstanceCollectives(every, _Hop(group), _Hop(group))
        instance._streams = device
        tensor = torch.full((2,), torch.nan)
        device.write(tensor, torch.tensor([3.0, 4.0]))
        handle = instance.reduce_scatter(tensor, 2.0)
        handle.wait()
        read = torch.zeros(2)
        device.write(read, tensor)
        device.synchronize()
        assert read.tolist() == [8.0, 10.0], "two hops"

    run_ranks(1, run)


def test_a_poison_test_draws_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.manual_seed`` is for the current one: ranks would draw different numbers, and differ in answers."""
    states: dict[str, list[Tensor]] = {}
    of_host = torch.default_generator.get_state()
    of_cpu: Any = torch.Generator
    at_first = of_cpu().manual_seed(3).get_state()

    class Module:
        @staticmethod
        def get_rng_state(device: torch.device) -> Tensor:
            return states[str(device)][-1] if str(device) in states else at_first

        @staticmethod
        def set_rng_state(state: Tensor, device: torch.device) -> None:
            states.setdefault(str(device), []).append(state)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(torch, "cuda", Module)
    monkeypatch.setattr(torch, "Generator", lambda device: of_cpu())
    with isolated(torch.device("cuda:1")):
        pass
    seeded, put_back = states.pop("cuda:1")
    assert not states
    assert torch.equal(seeded, of_cpu().manual_seed(0).get_state())
    assert torch.equal(put_back, at_first)
    assert torch.equal(torch.default_generator.get_state(), of_host)
