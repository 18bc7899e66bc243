"""I: what a rank holds is what the table says, and nothing is left behind."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import megastrategy
from megastrategy.core import memory_use

from ..context import Context
from ..devices import MIB
from ..models import Chain
from ..ranks import Rank
from ..training import Options, wrap

_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "bf16-gather-forward": ("bf16", {"overlap_param_gather": True}),
    "bf16-pooled": ("bf16", {"grad_buffer": "pooled"}),
    "bf16-fp32-sums": ("bf16", {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}),
    "offloaded": ("fp32", {"offload_optimizer_states": True}),
    "all-reduce": ("fp32", {"use_distributed_optimizer": False}),
}
_ROUNDING = 512
"""Bytes to which torch's allocator rounds a tensor on a GPU."""


def run(context: Context) -> None:
    """The whole section."""
    width, depth = (256, 6) if context.is_host else (2048, 12)
    # The host's own memory is what ranks that share a device are staged in.
    place = context.place("backend", 2) if context.is_host else context.place()
    for name in context.cases([*_CASES, "groups"]):
        if name == "groups":
            _groups(context)
            continue
        dtype, config = _CASES[name]
        with context.attempt(name):
            found = context.ranks(measure, width, depth, dtype, tuple(config.items()), place=place)
            first = found[0]
            # A bucket more: pooled gradients and sums of 16-bit ones have their own staging.
            limit = (first["bucket"] + first["slack"]) / MIB
            over = max(one["held"] - one["table"] for one in found) / MIB
            context.check(f"{name}.held-over-table", over, limit, unit="MiB")
            under = max(one["table"] - one["held"] for one in found) / MIB
            context.check(
                f"{name}.held-under-table", under, limit, unit="MiB", detail="else the table promises too little"
            )
            peak = max(one["peak"] - one["table"] for one in found) / MIB
            context.check(f"{name}.peak-over-table", peak, 2 * limit + first["staging"] / MIB, unit="MiB")
            hole = max(one["hole"] for one in found) / MIB
            unused = f"reserved, and not in use: {first['partly_used']}"
            # State takes the pieces that weights had before they moved, and torch does not join what is left of them.
            at_most = first["plain"] / MIB + limit + 40
            context.check(f"{name}.hole", hole, at_most, unit="MiB", detail=unused)
            context.check(f"{name}.left-after-close", max(one["left"] for one in found) / MIB, limit, unit="MiB")


def _groups(context: Context) -> None:
    with context.attempt("groups"):
        # NCCL takes memory on one rank too; ranks that share a device have no groups there.
        alone = context.place("alone") if context.num_gpus == 1 else context.place()
        for what, nbytes in context.ranks(measure_groups, place=alone)[0]:
            context.measure(f"groups.{what}", nbytes / MIB, "MiB")


def measure(rank: Rank, width: int, depth: int, dtype: str, config: Options) -> dict[str, Any]:
    """Bytes of this rank: held in a steady step, the most in one, and of the table."""
    device = rank.device
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    # Libraries take working memory of torch's allocator at their first call, and keep it.
    Chain(64, 2).to(kind).to(device.torch_device)(
        torch.ones(1, 64, dtype=kind, device=device.torch_device), 0, 0
    ).backward()
    before = device.allocated_bytes()
    module = Chain(width, depth).to(kind).to(device.torch_device)
    plain = device.allocated_bytes() - before
    x = torch.randn(1, width, dtype=kind, device=device.torch_device)
    model = wrap(rank, module, (("bucket_size", width * width), *config))
    # One tensor at a time: foreach and fused have no or large temporaries, and are not what is looked at.
    inner = torch.optim.AdamW(model.parameters(), foreach=False, fused=True)
    optimizer = megastrategy.DistributedOptimizer(inner, model)
    layout = model.layout
    table = memory_use(layout, rank.number, state_tensors=2, device=device.torch_device)
    for step in range(4):
        if step == 3:
            device.reset_peak()
        optimizer.zero_grad()
        model(x, 0, rank.number).backward()
        if step == 3:
            device.allocated_bytes()  # the host has no peak but where it is looked at
        optimizer.step()
    model.finish_param_gather()
    device.synchronize()
    held, peak, reserved = device.allocated_bytes(), device.peak_bytes(), device.reserved_bytes()
    partly_used = device.partly_used()
    largest = max(bucket.numel for bucket in layout.buckets) * 4
    num_tensors = 8 * len(layout.params)
    model.close()
    del optimizer, inner
    device.synchronize()
    deadline = time.monotonic() + 5.0
    # A backend's thread lets go of what it has sent a little after everybody else.
    while (left := device.allocated_bytes() - before - plain) > largest and time.monotonic() < deadline:
        time.sleep(0.1)
    return {
        "table": table.total_bytes,
        "staging": table.staging_bytes,
        "held": held - before,
        "peak": peak - before,
        "hole": max(0, reserved - held),
        "partly_used": partly_used,
        "left": left,
        "plain": plain,
        "bucket": largest,
        "slack": num_tensors * _ROUNDING + x.nbytes,
    }


def measure_groups(rank: Rank) -> list[tuple[str, int]]:
    """Measures what each process group takes of the device's memory, torch's own allocator apart."""
    found, device = [], rank.device
    data = torch.ones(1024, device=device.torch_device)
    for what in ("first", "second", "third"):
        device.synchronize()
        before = device.free_bytes()
        group = dist.new_group() if what != "first" else dist.group.WORLD
        dist.all_reduce(data, group=group)
        device.synchronize()
        found.append((f"{what}-group", before - device.free_bytes()))
    return found
