"""The connections that the engine's own gloo groups have, and when they end."""

from __future__ import annotations

import gc
import os
import socket
import struct
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, ProcessGroup

from benchmarks.counters import tcp_sockets
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import private_group
from megastrategy.core.collectives import GlooCollectives, make_collectives
from megastrategy.core.collectives.process_groups import destroy_group, part_of_group
from tests.support.processes import run_processes
from tests.support.ranks import gloo_group, run_ranks

CPU = torch.device("cpu")
NUMEL = 2**21


def traffic() -> dict[int, tuple[int, int]]:
    """Bytes sent and received by every TCP socket of this process, by inode, from the kernel (struct tcp_info)."""
    found: dict[int, tuple[int, int]] = {}
    for handle in tcp_sockets():
        info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
        (received,), (sent, sent_again) = struct.unpack_from("Q", info, 128), struct.unpack_from("2Q", info, 200)
        found[os.fstat(handle.fileno()).st_ino] = sent - sent_again, received
    return found


def _reduce_and_gather() -> list[tuple[int, int]]:
    group = private_group(None, CPU)
    collectives = make_collectives(group, CPU)
    collectives.all_gather(torch.zeros(2)).wait()  # connects, and agrees on tags
    before = traffic()
    tensor = torch.full((NUMEL,), 1.0 + group.rank())
    collectives.reduce_scatter(tensor, 1.0).wait()
    collectives.all_gather(tensor).wait()
    assert torch.equal(tensor, torch.full((NUMEL,), 3.0))
    after = traffic()
    collectives.all_gather(torch.zeros(2)).wait()  # gloo closes what the other rank closes, who may not have looked yet
    collectives.close()
    destroy_group(group)
    changes = [(after[i][0] - before.get(i, (0, 0))[0], after[i][1] - before.get(i, (0, 0))[1]) for i in after]
    return [change for change in changes if max(change) > 2**16]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads socket counters of the Linux kernel")
def test_two_ranks_send_over_one_connection_and_receive_over_another() -> None:
    """If both used one, its reader and its writer would block each other, and keep a core busy."""
    half = 4 * NUMEL  # of the tensor when it is reduced, and again when it is gathered
    for busy in run_processes(2, _reduce_and_gather):
        assert len(busy) == 2, busy
        (sent, in_return), (answered, received) = sorted(busy, reverse=True)
        assert half <= sent < 1.01 * half
        assert half <= received < 1.01 * half
        assert max(in_return, answered) < 0.01 * half


def _describe_part() -> None:
    group = private_group(None, CPU)
    ranks = dist.get_process_group_ranks(group)
    part = part_of_group(group, ranks, "a part of a part", CPU)
    assert dist.get_backend_config(part) == dist.get_backend_config(group) == dist.get_backend_config(dist.group.WORLD)
    assert dist.get_backend(part) == "gloo"
    assert part._device_types == group._device_types
    for made in (part, group):
        assert made._get_backend(CPU).options._timeout == dist.group.WORLD._get_backend(CPU).options._timeout  # type: ignore[union-attr]
        destroy_group(made)
        assert made not in dist.distributed_c10d._world.pg_map


def test_a_group_of_two_ranks_equals_torchs_except_for_its_connections() -> None:
    run_processes(2, _describe_part)


def test_two_ranks_reduce_and_gather_over_a_single_connection() -> None:
    """User code made the connection by hand, and passes it."""

    def run(rank: int, given: ProcessGroup) -> list[Tensor]:
        group = gloo_group(PrefixStore("one", store), rank, 2, connections=1)
        tensor = torch.arange(2.0**19) * (1 + rank)
        collectives = GlooCollectives(group)
        collectives.reduce_scatter(tensor, 0.5).wait()
        collectives.all_gather(tensor).wait()
        collectives.close()
        return [tensor]

    store = HashStore()
    for (tensor,) in run_ranks(2, run):
        assert torch.equal(tensor, torch.arange(2.0**19) * 1.5)


def _under_debugging() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    watched = dist.new_group(timeout=timedelta(seconds=60))
    group = private_group(watched, CPU)
    assert type(group._get_backend(CPU)).__name__ == "_ProcessGroupWrapper"
    collectives = make_collectives(group, CPU)
    tensor = torch.full((8,), 1.0 + group.rank())
    collectives.all_reduce(tensor, 1.0).wait()
    assert torch.equal(tensor, torch.full((8,), 3.0))
    collectives.close()


def test_torch_makes_the_group_if_it_watches_gloo() -> None:
    run_processes(2, _under_debugging)


# --- models that are not closed --------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "shards": {},
    "all-reduce": {"use_distributed_optimizer": False},
    "two groups": {"overlap_param_gather": True},
    "instances": {"num_distributed_optimizer_instances": 2},
}


def _open() -> tuple[int, int, int]:
    """Returns the numbers of threads, descriptors and of torch's process groups."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), groups


def _train_and_drop(options: dict[str, Any], times: int) -> None:
    for _ in range(times):
        module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**options))
        optimizer = DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.01), model)
        optimizer.itself = optimizer  # type: ignore[attr-defined] # a circle of references, as users have them
        for _ in range(2):
            model(torch.ones(3, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _wrap_many(options: dict[str, Any]) -> tuple[tuple[int, int, int], ...]:
    _train_and_drop(options, 2)
    gc.collect()
    before = _open()
    _train_and_drop(options, 10)
    during = _open()
    _train_and_drop(options, 20)
    after = _open()
    gc.collect()
    return before, during, after, _open()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_models_that_were_dropped_keep_no_thread_descriptor_or_group(size: int, options: dict[str, Any]) -> None:
    """A loop over folds or trials wraps hundreds, and closes none; Python collects garbage, and the wrap does."""
    if size == 1 and "num_distributed_optimizer_instances" in options:
        return
    for before, during, after, collected in run_processes(size, _wrap_many, options):
        assert all(now <= once for now, once in zip(collected, before, strict=True))  # a thread may end a bit later
        most_groups = 12  # the wrap collects at 8, and one model has up to 4
        assert during[2] - before[2] <= most_groups
        assert after[2] - before[2] <= most_groups
        assert after[1] - before[1] <= 9 * most_groups
        assert after[0] - before[0] <= 4 * most_groups


def _wrap_with_optimizers_that_stay() -> tuple[int, ...]:
    """Optimizers that outlive their models keep the groups that their state needs, until it was given back."""
    kept = []
    module = nn.Linear(6, 5)
    for _ in range(3):
        model = DistributedDataParallel(module)
        kept.append(torch.optim.AdamW(module.parameters(), lr=0.01))
        optimizer = DistributedOptimizer(kept[-1], model)
        model(torch.ones(3, 6)).square().mean().backward()
        optimizer.step()
    del model, optimizer
    groups = [_open()[2]]
    for inner in kept:
        assert inner.state_dict()["state"][0]["exp_avg"].shape == (5, 6)
        groups.append(_open()[2])
    return tuple(group - groups[-1] for group in groups)


def test_groups_stay_as_long_as_an_optimizer_needs_them() -> None:
    assert run_processes(2, _wrap_with_optimizers_that_stay) == [(3, 2, 1, 0)] * 2


@pytest.mark.real_collectives("is about gloo's thread")
def test_a_collected_model_does_not_close_given_collectives() -> None:
    """One group serves all fits of a process, and an earlier fit's model may be collected within a later one."""

    def run(rank: int, group: ProcessGroup) -> None:
        shared = make_collectives(group, CPU)
        dropped = DistributedDataParallel(nn.Linear(3, 3), collectives=shared)
        dropped.itself = [dropped.engine]  # a circle, which only the collector of garbage ends
        dropped.engine.listener = dropped
        model = DistributedDataParallel(nn.Linear(3, 3), collectives=shared)
        model(torch.ones(2, 3)).sum().backward()
        worker = shared._worker
        assert worker is not None
        engine = weakref.ref(dropped.engine)
        del dropped
        while engine() is not None:  # another thread may be collecting
            gc.collect()
        assert shared._worker is worker
        model(torch.ones(2, 3)).sum().backward()
        model.close()

    run_ranks(2, run)
