"""Bytes a rank holds, counted by walking every tensor that is alive, against the formula; and bytes on the wire."""

from __future__ import annotations

import gc
import math
import os
import socket
import stat
import struct
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._lightning.communication_monitor import _sent_bytes
from megastrategy.core.events import EventKind
from megastrategy.core.layout.build import build_layout
from megastrategy.core.layout.layout import ParamSpec
from megastrategy.core.layout.memory import memory_use
from tests.core.checkpoint.test_checkpoint_memory import AllocationWatch
from tests.support import odd_offsets
from tests.support.data_path import copied_grads, memory_of, state_bytes_of
from tests.support.ranks import run_ranks, with_instances


def bytes_of(tensors: list[Tensor]) -> int:
    """The memory that the tensors' storages cover, overlaps counted once."""
    spans = sorted({(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors})
    total, reached = 0, 0
    for start, nbytes in spans:
        end = start + nbytes
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def all_tensors() -> list[Tensor]:
    """Every tensor that the garbage collector knows of. By type: isinstance() would ask lazy objects."""
    return [obj for obj in gc.get_objects() if issubclass(type(obj), Tensor)]


def wide(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(100, 333), nn.Linear(333, 77), nn.Linear(77, 1, bias=False)).to(dtype)


@pytest.mark.parametrize(
    ("size", "instances", "way", "dtype"),
    [
        (1, 1, {}, torch.float32),
        (2, 1, {"use_distributed_optimizer": False}, torch.bfloat16),
        (3, 1, {"grad_buffer": "pooled"}, torch.float32),
        (4, 2, {"offload_optimizer_states": True}, torch.float32),
        (6, 3, {"offload_optimizer_states": True, "grad_buffer": "pooled"}, torch.float32),
    ],
    ids=str,
)
def test_tensors_held_equal_the_formula_to_the_byte(
    size: int, instances: int, way: dict[str, Any], dtype: torch.dtype
) -> None:
    """Parameters, gradients and optimizer state of every rank after two steps of Adam."""
    sharded = way.get("use_distributed_optimizer", True)
    if not sharded:
        instances = 1

    def run(rank: int, group: ProcessGroup) -> tuple[int, int, int]:
        module = wide(dtype)
        config = DistributedDataParallelConfig(bucket_size=5000, num_distributed_optimizer_instances=instances, **way)
        collectives = with_instances(group, instances) if instances > 1 else None
        model = DistributedDataParallel(module, config, group, collectives=collectives)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 100, dtype=dtype)).sum().backward()
            optimizer.step()
        flats, held_grads = memory_of(model)
        params = bytes_of([*module.parameters(), *flats])
        grads = bytes_of([*held_grads, *copied_grads(optimizer)])
        state = state_bytes_of(optimizer)
        use = memory_use(model.layout, rank, state_tensors=2)
        assert (params, grads, state) == (use.param_bytes, use.grad_bytes, use.state_bytes)
        assert use.host_bytes == 0, "state on the host of an accelerator is in test_host_state.py"
        return params, grads, state

    per_rank = run_ranks(size, run)
    numel = sum(param.numel() for param in wide(dtype).parameters())
    shares = size // instances if sharded else 1
    of_params, of_grads, of_state = {torch.float32: (4, 4, 8), torch.bfloat16: (2, 4, 12)}[dtype]
    padding = 4 * (math.lcm(128, 64 * size) + 6 * 64)  # at most, in elements: 4 buckets, 5 parameters
    grads_shares = shares if way.get("grad_buffer") == "pooled" else 1
    for params, grads, _ in per_rank:
        assert of_params * numel <= params <= of_params * (numel + padding)
        assert of_grads * numel <= grads * grads_shares <= of_grads * (numel + padding)
    total_state = sum(state for _, _, state in per_rank)
    least = of_state * numel * (size // shares)  # an element's state is on one rank of each instance (or on all)
    assert least <= total_state <= least + of_state * (size // shares) * (padding if shares > 1 else 0)


@pytest.mark.real_collectives("counts memory, and lazy ones copy what they send")
@pytest.mark.parametrize("size", [1, 2])
def test_first_backward_memory_is_the_formula(size: int) -> None:
    """In a backward with hardly any activations: what it made, beside the weights that were there."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = wide(torch.float32)
        config = DistributedDataParallelConfig(bucket_size=5000, use_distributed_optimizer=size > 1)
        model = DistributedDataParallel(module, config, group)
        loss = model(torch.ones(1, 100)).sum()
        with AllocationWatch() as watch:
            loss.backward()
        use = memory_use(model.layout, rank, state_tensors=2)
        weights = sum(param.nbytes for param in module.parameters())
        made = use.first_backward_bytes - weights
        assert made <= watch.peak <= 1.02 * made

    run_ranks(size, run)


@pytest.mark.skipif(odd_offsets.VARIABLE in os.environ, reason="counts bytes, and odd offsets need some more")
def test_nothing_else_is_alive() -> None:
    """All tensors of the process, not only those we know of: params + grads + state, and 4 bytes a step counter."""

    def run(rank: int, group: ProcessGroup) -> None:
        gc.collect()
        before = {id(tensor) for tensor in all_tensors()}
        module = wide(torch.float32)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=5000), group)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
        use = memory_use(model.layout, rank, state_tensors=2)
        gc.collect()
        alive = [tensor for tensor in all_tensors() if id(tensor) not in before]
        counters = len([v for values in optimizer.state.values() for v in values.values() if v.dim() == 0])
        assert bytes_of(alive) == use.total_bytes + 4 * counters

    run_ranks(1, run)


def bytes_received() -> dict[int, int]:
    """By every TCP socket of this process, by inode, from the kernel (tcp_info.tcpi_bytes_received)."""
    received: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):  # the listing itself was one of them, and is closed by now
        duplicate = os.dup(int(name)) if os.path.exists(f"/proc/self/fd/{name}") else -1
        if duplicate >= 0 and stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            with socket.socket(fileno=duplicate) as handle:
                if handle.family in (socket.AF_INET, socket.AF_INET6) and handle.type == socket.SOCK_STREAM:
                    info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    received[os.fstat(duplicate).st_ino] = struct.unpack_from("Q", info, 128)[0]
        elif duplicate >= 0:
            os.close(duplicate)
    return received


@pytest.mark.parametrize(
    ("size", "way", "dtype", "bytes_a_param"),
    [
        (2, {}, torch.float32, 8),
        (3, {}, torch.bfloat16, 6),
        (4, {"use_distributed_optimizer": False}, torch.float32, 8),
        (2, {"use_distributed_optimizer": False}, torch.bfloat16, 8),
        (2, {"grad_buffer": "pooled", "grad_reduce_in_fp32": False}, torch.bfloat16, 4),
        (2, {"grad_wire_dtype": "bf16"}, torch.float32, 6),
        (2, {"grad_wire_dtype": "fp16"}, torch.float32, 6),
        (2, {"grad_wire_dtype": "bf16", "grad_buffer": "pooled"}, torch.float32, 6),
    ],
    ids=str,
)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads socket counters of the Linux kernel")
@pytest.mark.real_collectives("counts what the rings send")
def test_bytes_on_the_wire_are_at_the_floor(
    size: int, way: dict[str, Any], dtype: torch.dtype, bytes_a_param: float
) -> None:
    """Within 1 % of 8(d-1)/d bytes a parameter a rank in fp32; 6(d-1)/d with bf16 weights and fp32 gradients."""
    check_bytes_on_the_wire(size, dtype, bytes_a_param * (size - 1) / size, **way)


@pytest.mark.parametrize(("size", "instances", "kind"), [(4, 2, "fp32"), (6, 2, "bf16 weights")])
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads socket counters of the Linux kernel")
@pytest.mark.real_collectives("counts what the rings send")
def test_wire_bytes_of_instances_are_at_the_floor(size: int, instances: int, kind: str) -> None:
    """A reduce-scatter and a gather over the s ranks of an instance, and an all-reduce of a shard over n instances."""
    grad_bytes, param_bytes = {"fp32": (4, 4), "bf16 weights": (4, 2)}[kind]
    shards = size // instances
    inside, between = (shards - 1) / shards, 2 * (instances - 1) / instances / shards
    floor = (grad_bytes + param_bytes) * inside + 4 * between  # sums in fp32 in any case
    if kind == "fp32":
        assert math.isclose(floor, 8 * (size - 1) / size), "as much as with one instance"
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    check_bytes_on_the_wire(size, dtype, floor, num_distributed_optimizer_instances=instances)


def linears(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)).to(dtype)


def check_bytes_on_the_wire(size: int, dtype: torch.dtype, bytes_a_param: float, **options: Any) -> None:
    """The kernel's count in three steps, by rank and parameter."""
    steps = 3
    elsewhere = bytes_received().keys()

    def run(rank: int, group: ProcessGroup) -> tuple[int, int]:
        module = linears(dtype)
        config = DistributedDataParallelConfig(bucket_size=300_000, **options)
        instances = config.num_distributed_optimizer_instances
        collectives = with_instances(group, instances) if instances > 1 else None
        model = DistributedDataParallel(module, config, group, collectives=collectives)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        counts = []
        for number in range(steps + 1):
            optimizer.zero_grad()
            model(torch.ones(2, 512, dtype=dtype)).sum().backward()
            optimizer.step()
            if number in (0, steps):
                group.barrier().wait()
                # by one rank for all: they are threads of this process
                now = bytes_received() if rank == 0 else {}
                counts.append(sum(count for inode, count in now.items() if inode not in elsewhere))
                group.barrier().wait()
        return counts[0], counts[1]

    before, after = run_ranks(size, run)[0]
    numel = sum(param.numel() for param in linears(dtype).parameters())
    floor = bytes_a_param * numel
    sent = (after - before) / size / steps
    assert 1.0 <= sent / floor < 1.01, f"{sent / numel:.3f} bytes a parameter, the floor is {floor / numel:.3f}"


# The bytes that CommunicationMonitor logs, where the optimizer has several instances.


@pytest.mark.parametrize(("size", "instances"), [(4, 1), (4, 2), (6, 2), (6, 3), (4, 4)])
def test_monitor_counts_sent_bytes(size: int, instances: int) -> None:
    config = DistributedDataParallelConfig(num_distributed_optimizer_instances=instances)
    layout = build_layout([ParamSpec("a", (1536,), (1,), torch.float32, torch.float32)], config, size)
    reduced, gathered = (_sent_bytes(layout, kind, 0) for kind in (EventKind.REDUCE_START, EventKind.GATHER_START))
    shards = size // instances
    assert gathered == 4 * 1536 * (shards - 1) // shards, "inside an instance"
    assert reduced + gathered == 8 * 1536 * (size - 1) // size
