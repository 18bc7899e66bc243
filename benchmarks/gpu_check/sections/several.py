"""Q, R: what can be seen with several GPUs alone: bandwidth, overlap, and what may hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import megastrategy
from megastrategy.core.collectives import BackendCollectives
from megastrategy.core.collectives.process_groups import world_group

from ..context import Context
from ..devices import MIB
from ..models import Chain, Gpt, microbatch
from ..ranks import Rank
from ..traces import Span, merged, record
from ..training import wrap
from .work import ddp, ours, repeated, sizes

_NEEDS = "with --gpus 2 and more: ranks that share a GPU share its memory, and no link"

# --- Q ---------------------------------------------------------------------------------------------------------------

OFFSETS = (0, 2, 4, 8)
"""Bytes between a 128-byte boundary and the first shard."""
_LEAST_OVERLAP = 0.9
"""The least share of torch DDP's overlap, for the same bytes."""


def run_links(context: Context) -> None:
    """Q: bandwidth by size and alignment, by priority of the stream, and what is hidden under compute."""
    if context.num_gpus == 1:
        context.skip("all", _NEEDS)
        return
    mib = (1, 4) if context.is_host else (1, 4, 16, 64, 160)
    for case in context.cases([*(f"overlap.{name}" for name in sizes(context)), "bandwidth", *_SKIPPED_ON_HOST]):
        with context.attempt(case):
            if case == "bandwidth":
                for name, rate in context.ranks(bandwidths, mib, 2 if context.is_host else 20)[0].items():
                    context.measure(f"bandwidth.{name}", rate, "GB/s", "on the bus")
            elif case not in _SKIPPED_ON_HOST:
                _overlap(context, case.partition(".")[2])
            elif context.is_host:
                context.skip(case, _SKIPPED_ON_HOST[case])
            elif case == "priority":
                for name, ms in context.ranks(priorities)[0].items():
                    context.measure(f"priority.{name}", ms, "ms", "products of matrices beside a reduce-scatter")
            else:
                for name, ms in context.ranks(scales)[0].items():
                    context.measure(f"scale-in-collective.{name}", ms, "ms", "64 MiB")


_SKIPPED_ON_HOST = {
    "priority": "the host has no streams to choose between",
    "scale-in-collective": "gloo has no sum that scales",
}


def _overlap(context: Context, name: str) -> None:
    mine, theirs = context.ranks(overlaps, sizes(context)[name], 2 if context.is_host else 8)[0]
    if mine is None or theirs is None:
        context.skip(f"overlap.{name}", "no kernel in the trace is called nccl")
        return
    context.measure(f"overlap.{name}.ddp", theirs, "of NCCL's time")
    context.check(f"overlap.{name}.ours", mine, _LEAST_OVERLAP * theirs, at_least=True, unit="of NCCL's time")


def _ms(rank: Rank, run: Callable[[], object], times: int) -> float:
    """A call's, after one that is not timed."""
    run()
    rank.device.synchronize()
    first = rank.device.mark()
    for _ in range(times):
        run()
    return float(rank.device.ms_between(first, rank.device.mark())) / times


def bandwidths(rank: Rank, mib: tuple[int, ...], times: int) -> dict[str, float]:
    """GB/s on the bus by collective, size and offset: (d - 1)/d of the bytes, over the time."""
    collectives = BackendCollectives(world_group())
    found = {}
    for size in mib:
        numel = size * MIB // 2 // (64 * rank.size) * 64 * rank.size
        memory = torch.zeros(numel + 64, dtype=torch.bfloat16, device=rank.device.torch_device)
        for offset in OFFSETS:
            tensor = memory[offset // 2 : offset // 2 + numel]
            calls = {
                "reduce-scatter": lambda tensor=tensor: collectives.reduce_scatter(tensor, 1.0).wait(),
                "all-gather": lambda tensor=tensor: collectives.all_gather(tensor).wait(),
            }
            for name, call in calls.items():
                seconds = _ms(rank, call, times) / 1e3
                found[f"{name}.{size}-mib.off-by-{offset}"] = (
                    tensor.nbytes * (rank.size - 1) / rank.size / seconds / 1e9
                )
    return found


def priorities(rank: Rank) -> dict[str, float]:
    """Milliseconds for products of matrices beside a reduce-scatter, by the priority of NCCL's stream."""
    found = {}
    a = torch.randn(4096, 4096, device=rank.device.torch_device, dtype=torch.bfloat16)
    for name, high in (("normal", False), ("high", True)):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high)
        collectives = BackendCollectives(dist.new_group(pg_options=options))
        data = torch.zeros(32 * MIB // rank.size * rank.size, dtype=torch.bfloat16, device=rank.device.torch_device)

        def both(collectives: BackendCollectives = collectives, data: torch.Tensor = data) -> None:
            handle = collectives.reduce_scatter(data, 1.0)
            for _ in range(20):
                a @ a
            handle.wait()

        found[name] = _ms(rank, both, 10)
    return found


def scales(rank: Rank) -> dict[str, float]:
    """Milliseconds of a reduce-scatter that averages: by a pass before it, inside it, and as NCCL's AVG."""
    group = world_group()
    collectives = BackendCollectives(group)
    numel = 16 * MIB // (64 * rank.size) * 64 * rank.size
    data = torch.zeros(numel, device=rank.device.torch_device)
    own = data.chunk(rank.size)[rank.number]
    found = {
        "pass-before": _ms(rank, lambda: collectives.reduce_scatter(data, 1 / rank.size).wait(), 20),
    }
    make: Any = getattr(dist, "_make_nccl_premul_sum", None)
    if make is not None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = make(1 / rank.size)
        found["premul-sum"] = _ms(rank, lambda: group._reduce_scatter_base(own, data, options).wait(), 20)
    return found


def overlaps(rank: Rank, size: tuple[int, int, int, int], batch: int) -> tuple[float | None, float | None]:
    """The share of NCCL's time under other kernels: ours, torch DDP's."""
    model, step = ours(rank, lambda: Gpt(size, batch), {"use_distributed_optimizer": False}, fused=True, foreach=False)
    mine = hidden_share(record(rank.device, repeated(step, 3)).work)
    model.close()
    del model, step
    theirs = ddp(rank, lambda: Gpt(size, batch), fused=True, foreach=False)
    return mine, hidden_share(record(rank.device, repeated(theirs, 3)).work)


def hidden_share(work: list[Span]) -> float | None:
    """The share of the time of kernels named after NCCL during which another kernel ran; None without any."""
    sent = [span for span in work if "nccl" in span.name.lower()]
    computed = merged([span for span in work if "nccl" not in span.name.lower()])
    total = sum(span.end_us - span.start_us for span in sent)
    if not total:
        return None
    hidden = sum(
        max(0.0, min(span.end_us, end) - max(span.start_us, start)) for span in sent for start, end in computed
    )
    return hidden / total


# --- R ---------------------------------------------------------------------------------------------------------------


def run_hazards(context: Context) -> None:
    """R: what might wait for ever: one hardware queue for two communicators, and a group of some ranks."""
    if context.num_gpus == 1:
        context.skip("all", _NEEDS)
        return
    if context.is_host:
        context.skip("one-queue", "SyncBatchNorm and hardware queues are the GPU's")
    else:
        with context.attempt("one-queue"):
            place = context.place(environment=(("CUDA_DEVICE_MAX_CONNECTIONS", "1"),))
            context.check_equal("one-queue", "8 steps", _any(context.ranks(train_with_sync_batch_norm, place=place)))
    for binds in (False, True):
        name = f"half-of-the-ranks{'-bound' if binds else ''}"
        with context.attempt(name):
            told = _any(context.ranks(wrap_half, place=context.place(binds=binds, timeout_s=45.0)))
            context.check_equal(name, f"{max(1, context.num_gpus // 2)} ranks", told)


def _any(found: list[str]) -> str:
    return "; ".join(text for text in found if text)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(13, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)
        self.some = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.some[used](hidden))).square().mean()


def train_with_sync_batch_norm(rank: Rank) -> str:
    """Ranks that use different layers, beside other code's collectives in forward and backward."""
    torch.manual_seed(0)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(_Normed()).to(rank.device.torch_device)
    model = wrap(rank, module, {"bucket_size": 1000})
    optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    x = torch.randn(16, 13, generator=torch.Generator().manual_seed(rank.number)).to(rank.device.torch_device)
    for step in range(8):
        optimizer.zero_grad()
        model(x, (step + rank.number) % 8).backward()
        optimizer.step()
    rank.device.synchronize()
    model.close()
    return ""


def wrap_half(rank: Rank) -> str:
    """The first half of the ranks trains, the others do nothing with it; what went wrong, if anything."""
    members = list(range(max(1, rank.size // 2)))
    group = dist.new_group(members)
    found = ""
    if rank.number in members:
        module = Chain().to(rank.device.torch_device)
        model = megastrategy.DistributedDataParallel(
            module, megastrategy.DistributedDataParallelConfig(bucket_size=200), process_group=group
        )
        optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
        for step in range(4):
            optimizer.zero_grad()
            x = microbatch(module, rank.number, step, 0, torch.float32).to(rank.device.torch_device)
            model(x, step, rank.number).backward()
            optimizer.step()
        model.close()
        if not all(bool(torch.isfinite(param).all()) for param in module.parameters()):
            found = f"rank {rank.number}: weights are not finite"
    rank.device.synchronize()
    dist.barrier()
    return found
