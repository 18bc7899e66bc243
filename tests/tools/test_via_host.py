"""Gloo for tensors on an accelerator. The device is a double in host memory, whose streams do their work as late as
they may: a wait that is missing, on the host or on a stream, is a wrong number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.gpu_check import via_host
from benchmarks.gpu_check.via_host import ViaHostCollectives
from megastrategy import DistributedDataParallelConfig
from megastrategy.core.collectives import Collectives, GlooCollectives, make_collectives
from megastrategy.core.errors import CollectiveError
from tests.support.lazy_device import Event, LazyDevice, Stream
from tests.support.ranks import run_ranks, try_ranks, with_instances
from tests.support.training import Run, assert_same_bits, start_ours, train_with_ddp, train_with_ours

CPU = torch.device("cpu")


def values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def staged(real: Collectives, device: LazyDevice | None = None) -> ViaHostCollectives:
    """With the instances that were made by hand."""
    device = device or LazyDevice()
    collectives = ViaHostCollectives(real, CPU, device)
    for size, instance in real.instances.items():
        collectives.instances[size] = ViaHostCollectives(instance, CPU, device, staging=collectives)
    return collectives


def everything(collectives: Collectives, device: LazyDevice | None, numel: int) -> list[Tensor]:
    """Starts one of each before any is waited for, and returns their results."""
    rank, size = collectives.rank, collectives.size
    own = slice(rank * numel, (rank + 1) * numel)

    def written(given: Tensor) -> Tensor:
        if device is None:
            return given.clone()
        tensor = torch.full_like(given, torch.nan if given.is_floating_point() else 77)
        device.write(tensor, given)
        return tensor

    whole = values(rank, size * numel)
    reduced, scattered, largest = written(whole), written(whole), written(whole[:3])
    summed, sums = written(whole.bfloat16()), written(torch.full((numel,), 0.1))
    gathered = torch.zeros(size * numel)
    gathered[own] = values(rank, numel)
    gathered, sent = written(gathered), written(torch.arange(5) + rank)
    handles = [
        collectives.all_reduce(reduced, 1 / 3),
        collectives.reduce_scatter(scattered, 1 / 3),
        collectives.reduce_scatter_into(sums, summed, 1 / 3),
        collectives.all_gather(gathered),
        collectives.all_reduce_max(largest),
        collectives.broadcast(sent),
    ]
    for handle in handles:
        handle.wait()
        handle.wait()
    if device is not None:
        device.synchronize()
    return [reduced, scattered[own], sums, gathered, largest, sent]


def compare(rank: int, group: ProcessGroup) -> None:
    device = LazyDevice(lazy_caller=True)
    collectives = staged(GlooCollectives(group), device)
    plain = GlooCollectives(group)
    for numel in (40, 7, 9_000):  # memory is used again, and grows
        ours = everything(collectives, device, numel)
        for mine, theirs in zip(ours, everything(plain, None, numel), strict=True):
            assert torch.equal(mine, theirs)
    collectives.close()
    plain.close()


def test_host_tensors_are_not_copied_over_the_device() -> None:
    """Bytes that ranks agree on: the device has work that never ends."""

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = ViaHostCollectives(GlooCollectives(group), torch.device("cuda"), LazyDevice(lazy_caller=True))
        assert collectives.all_gather_bytes(b"x" * rank) == [b"", b"x"]
        assert collectives.max_of_bytes([rank, 1 - rank, 0]) == [1, 1, 0]
        collectives.close()

    run_ranks(2, run)


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_has_the_results_of_the_hosts_own(size: int) -> None:
    run_ranks(size, compare)


class _NoWait(Event):
    def wait(self, stream: Any) -> None:
        pass


class _NoQuery(Event):
    def query(self) -> bool:
        return True


@pytest.mark.parametrize("broken", [_NoWait, _NoQuery])
def test_without_a_wait_for_an_event_the_numbers_are_wrong(broken: type[Event], monkeypatch: Any) -> None:
    """So the double sees it."""
    monkeypatch.setattr(LazyDevice, "Event", broken)
    assert all(isinstance(outcome, AssertionError) for outcome in try_ranks(2, compare))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_param_gather": True},
        {"use_distributed_optimizer": False},
        {"grad_buffer": "pooled"},
        {"num_distributed_optimizer_instances": 2},
        {"num_distributed_optimizer_instances": 2, "grad_buffer": "pooled"},
        {"overlap_grad_reduce": False, "overlap_param_gather": False},
    ],
    ids=str,
)
def test_training_has_the_same_bits(options: dict[str, Any]) -> None:
    config = DistributedDataParallelConfig(bucket_size=200, **options)
    size, run = 2 * config.num_distributed_optimizer_instances, Run(accumulate=2, groups=3)

    def train(rank: int, group: ProcessGroup) -> Any:
        training = start_ours(run, rank, group, config, staged)
        assert isinstance(training.model.engine.shard_collectives, ViaHostCollectives)
        for step in range(run.steps):
            training.step(step)
        return training.finish()

    ours = run_ranks(size, train)
    assert_same_bits(ours, train_with_ours(run, size, config))
    if size == 2 and config.grad_buffer != "pooled":
        assert_same_bits(ours, train_with_ddp(run, size))


def test_a_rank_that_does_not_come_ends_the_others_with_a_reason() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        collectives = staged(GlooCollectives(group))
        tensor = torch.ones(4)
        collectives.all_reduce(tensor, 1.0).wait()
        if rank == 0:
            handles = [collectives.all_reduce(tensor, 1.0) for _ in range(2)]
            with pytest.raises(CollectiveError, match="rank 0 of 2: all-reduce did not complete"):
                handles[0].wait()
            # A wait for a later one first, as for the ranks' agreement, returns the same kind.
            with pytest.raises(CollectiveError, match="one before it had failed: rank 0 of 2: all-reduce did not"):
                handles[1].wait()
        collectives.close()

    run_ranks(2, run, timeout_s=3)


@pytest.mark.real_collectives("asks which these are")
def test_only_gloo_on_an_accelerator_is_staged() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        backend = group._get_backend(CPU)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.GLOO, backend)
        assert isinstance(via_host.make_collectives(group, CPU), GlooCollectives)
        made = via_host.make_collectives(group, torch.device("cuda"))
        assert isinstance(made, ViaHostCollectives)
        assert isinstance(made.real, GlooCollectives)
        with pytest.raises(ValueError, match=r"sends tensors on cuda by gloo.*init_process_group\('nccl'\)"):
            make_collectives(group, torch.device("cuda"))

    run_ranks(2, run)


def test_instances_made_by_hand_are_those_of_the_host() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        every = with_instances(group, 2)
        instance = staged(every).instances[2]
        assert (instance.rank, instance.size, instance.is_rank_zero) == (rank % 2, 2, rank == 0)

    run_ranks(4, run)


def test_the_thread_that_stages_asks_events_on_the_streams_device() -> None:
    """A thread begins on the first device, and a question there makes a context, with memory of its own."""
    device, asked = LazyDevice(lazy_caller=True), list[Stream]()

    class Asked(Event):
        def query(self) -> bool:
            asked.append(device.current_stream(None))
            return super().query()

    device.Event = Asked

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = ViaHostCollectives(GlooCollectives(group), torch.device("cpu"), device)
        collectives.all_reduce(torch.ones(3), 1.0).wait()
        assert asked
        assert all(stream is collectives._stream for stream in asked)
        collectives.close()

    run_ranks(1, run)
