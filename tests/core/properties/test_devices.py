"""The current device need not be the model's: a script that calls no ``set_device`` has the first one on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, to_host
from megastrategy.core.collectives import BackendCollectives, Handle, SingleRankCollectives
from megastrategy.core.collectives.instanced import InstanceCollectives
from megastrategy.core.collectives.single_rank import Done
from megastrategy.data import ResumableSampler
from tests.support.lazy_device import Event, LazyDevice, Stream
from tests.support.prescribed_grads import Given, Ours, assert_same_file
from tests.support.ranks import run_ranks
from tests.support.thread_checkpoints import saving_among_threads


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


# A default device (``torch.set_default_device("cuda")``) is the user's: what the host keeps and sends stays there.
# Here the default is meta, so that whatever is made there by mistake cannot be read.


class OnHost(Given):
    def __init__(self, dtype: torch.dtype) -> None:
        with torch.device("cpu"):
            super().__init__(dtype)

    def forward(self, step: int) -> Tensor:
        with torch.device("cpu"):
            return super().forward(step)


def momentum(params: Any) -> torch.optim.Optimizer:
    # Adam makes its counters on the default device itself.
    return torch.optim.SGD(params, lr=0.001, momentum=0.9)


@pytest.mark.parametrize("options", [{}, {"grad_buffer": "pooled", "overlap_param_gather": True}], ids=str)
@pytest.mark.real_collectives("the double's own tensors would be on the default device")
def test_nothing_of_the_hosts_is_made_on_it(options: dict[str, Any], tmp_path: Path) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        with torch.device("meta"):
            ours = Ours(group, momentum, torch.float32, kind=OnHost, check_for_nan_in_grad=True, **options)
            ours.train(range(2))
            file = ours.file()
            state = {"model": dict(ours.module.state_dict()), "optimizer": ours.optimizer.sharded_state_dict()}
            save_directory(to_host(state), {}, tmp_path / "saved", ours.collectives)
            ours.train(range(2, 3))
            uncut = ours.file()
            ours.load(file)
            ours.module.load_state_dict(OpenDirectory(tmp_path / "saved").read("model"))
            ours.optimizer.load_sharded(tmp_path / "saved")
            ours.train(range(2, 3))
            assert_same_file(ours.file(), uncut)
            ours.model.close()

    with saving_among_threads():
        run_ranks(2, run)


def test_an_order_of_samples_is_made_on_the_host() -> None:
    expected = list(ResumableSampler(range(10), num_replicas=2, rank=1))
    with torch.device("meta"):
        assert list(ResumableSampler(range(10), num_replicas=2, rank=1)) == expected
