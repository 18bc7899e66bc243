"""The current device need not be the model's: a script that calls no ``set_device`` has the first one on every rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core.collectives import BackendCollectives, Handle, SingleRankCollectives
from megastrategy.core.collectives.instanced import InstanceCollectives
from megastrategy.core.collectives.single_rank import Done
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


def test_instance_sums_wait_on_stream_of_the_model() -> None:
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
