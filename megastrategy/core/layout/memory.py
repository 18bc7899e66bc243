"""Computes from the layout the bytes that a rank needs, for the README's table and the lines at the start of a fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch

from ..devices import pinned_bytes
from .blocks import block_numel, neighbours
from .layout import BufferLayout
from .owners import EVERY_RANK, Owners

_HOST = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank: parameters, gradients, and optimizer state with fp32 main params.

    ``grad_bytes`` contains the copies of reduced gradients that a step needs in another dtype or shape, which stay.
    ``staging_bytes`` (with pooled gradients) and ``received_bytes`` (where gradients are summed in a wider dtype than
    they are sent in, except by gloo) are needed in addition while a backward is reduced. ``host_bytes`` are in host
    memory, main params and gradients pinned, and are not included in the others. ``first_backward_bytes``: parameters
    and gradients at the end of the first backward, when they are in the module's memory still and in buffers already.
    """

    param_bytes: int
    grad_bytes: int
    state_bytes: int
    staging_bytes: int = 0
    received_bytes: int = 0
    host_bytes: int = 0
    first_backward_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.param_bytes + self.grad_bytes + self.state_bytes


def memory_use(
    layout: BufferLayout,
    dp_rank: int,
    state_tensors: int | Mapping[int, int],
    rank_of: Mapping[int, int] | None = None,
    device: torch.device = _HOST,
    *,
    groups: Mapping[int, Hashable] | None = None,
) -> MemoryUse:
    """Counts the bytes that the engine keeps for the trainable parameters, exactly, in tensors with
    one number per element.

    Args:
        dp_rank: ranks differ by padding and rounding, since shards are cut at bucket borders.
        state_tensors: the numbers that optimizers keep per element (Adam: 2), in the dtype that they step; an int, or
            by parameter. Factored state (Adafactor's) is not counted.
        rank_of: the owners of parameters that are stepped whole, in an instance.
        device: where training runs. Offloaded state of an accelerator is on the host: main params and gradients in
            pinned memory, whose allocations are rounded up.
        groups: by parameter, its optimizer's group. Neighbours of one group are stepped as one tensor, with the padding
            between them. By default neighbours with the same ``state_tensors`` are of one group.
    """
    params = sum(spec.numel * spec.dtype.itemsize for spec in layout.params)
    is_sharded = layout.num_shards > 1
    param_bytes = sum(buffer.numel * buffer.dtype.itemsize for buffer in layout.buffers) if is_sharded else params
    grad_bytes = 0
    for buffer in layout.buffers:
        if not layout.is_pooled:
            grad_bytes += buffer.numel * buffer.grad_dtype.itemsize
        # Beside the gradients where 16-bit ones are summed in fp32; instead of them where they are pooled.
        if buffer.has_separate_sums:
            grad_bytes += buffer.shard_numel * buffer.sum_dtype.itemsize
    first_backward_bytes = param_bytes + grad_bytes + params + (params if is_sharded else 0)
    offloads = layout.offloads_state and device.type != "cpu"
    state_bytes = 0
    pinned_by_dtype: dict[torch.dtype, int] = {}
    if groups is None:
        groups = {index: _num_kept(state_tensors, index) for index in range(len(layout.params))}
    for run in _stepped(layout, dp_rank, groups, rank_of or {}, device):
        spec = layout.params[run.param]
        main_dtype = torch.float32 if spec.has_main_param else spec.dtype
        main_bytes = run.numel * main_dtype.itemsize
        if offloads:
            pinned_by_dtype[spec.dtype] = pinned_by_dtype.get(spec.dtype, 0) + main_bytes
        elif spec.has_main_param:
            state_bytes += main_bytes
        if run.grad_dtype != main_dtype and not offloads:
            grad_bytes += main_bytes
        state_bytes += _num_kept(state_tensors, run.param) * main_bytes
    # Main params, and the gradients that are copied to them, are one allocation for each dtype of weights.
    host_bytes = sum(2 * pinned_bytes(nbytes, device) for nbytes in pinned_by_dtype.values())
    if offloads:
        host_bytes += state_bytes
        state_bytes = 0
    on_top = sum(layout.staging_nbytes), sum(layout.received_nbytes)
    return MemoryUse(param_bytes, grad_bytes, state_bytes, *on_top, host_bytes, first_backward_bytes)


class _Stepped(NamedTuple):
    """A tensor that an optimizer steps: its first parameter, its elements, and the dtype of the reduced gradient in its
    shape; None if there is no such gradient."""

    param: int
    numel: int
    grad_dtype: torch.dtype | None


def _stepped(
    layout: BufferLayout,
    dp_rank: int,
    groups: Mapping[int, Hashable],
    rank_of: Mapping[int, int],
    device: torch.device,
) -> Iterator[_Stepped]:
    if layout.num_shards == 1:
        for index, spec in enumerate(layout.params):
            if index in groups:
                yield _Stepped(index, spec.numel, spec.grad_dtype)
        return
    max_numel = block_numel(layout, device)
    for bucket in layout.buckets:
        buffer = layout.buffers[bucket.buffer]
        dtype = buffer.sum_dtype if buffer.has_separate_sums else buffer.grad_dtype
        for _, parts in neighbours(layout, bucket, dp_rank, groups, rank_of, max_numel, set(groups.values())):
            yield _Stepped(parts[0].param, parts[-1].end - parts[0].start, dtype)
        for index in bucket.params:
            if rank_of.get(index) in (EVERY_RANK, bucket.domain.shard_of(dp_rank)):
                yield _Stepped(index, layout.params[index].numel, None)


def memory_use_of_ddp(layout: BufferLayout, state_tensors: int | Mapping[int, int]) -> MemoryUse:
    """Counts torch DDP's bytes for the same parameters with ``gradient_as_bucket_view=True`` (by
    default, twice the gradients)."""
    nbytes = [spec.numel * spec.dtype.itemsize for spec in layout.params]
    state_bytes = sum(_num_kept(state_tensors, index) * each for index, each in enumerate(nbytes))
    return MemoryUse(sum(nbytes), sum(nbytes), state_bytes)


def _num_kept(state_tensors: int | Mapping[int, int], index: int) -> int:
    return state_tensors if isinstance(state_tensors, int) else state_tensors.get(index, 0)


def describe_setup(
    layout: BufferLayout,
    dp_rank: int,
    overlap: bool,
    state_tensors: int | Mapping[int, int] | None,
    *,
    owners: Owners | None = None,
    device: torch.device = _HOST,
    groups: Mapping[int, Hashable] | None = None,
) -> str:
    """Returns the lines printed at the start of a fit: the reduction, and the bytes of a rank beside torch DDP's.

    Args:
        overlap: whether buckets are sent while backward runs.
        state_tensors, device, groups: as for :func:`memory_use`; None if the optimizer's state is not known yet.
        owners: of parameters that are stepped whole.
    """
    numels = [bucket.numel for bucket in layout.buckets]
    rank_of = owners.rank_of if owners is not None else {}
    use = memory_use(layout, dp_rank, state_tensors or 0, rank_of, device, groups=groups)
    if layout.dp_size == 1:
        reduction = "nothing is sent, nothing is sharded"
    elif layout.num_shards == 1:
        reduction = "all-reduce, whole optimizer on every rank"
    elif layout.num_instances == 1:
        reduction = "reduce-scatter, sharded optimizer"
    else:
        reduction = (
            f"reduce-scatter inside {layout.num_instances} instances of {layout.num_shards} ranks, all-reduce between "
            "them, optimizer sharded inside"
        )
    timing = "while backward runs" if overlap else "after backward"
    names = dict.fromkeys(str(buffer.grad_wire_dtype).removeprefix("torch.") for buffer in layout.buffers)
    dtypes = ", ".join(names) or "nothing"
    sending = f"sent as {dtypes} {timing}" if layout.dp_size > 1 else f"of {dtypes}"
    sizes = f"{min(numels):,} to {max(numels):,} elements each" if numels else "no trainable parameter"
    lines = [
        f"megatron_ddp on {layout.dp_size} rank(s): {reduction}",
        f"  {len(numels)} bucket(s), {sizes}, {sum(numels):,} in all, {sending}",
        f"  {'bytes a rank':<16}{'parameters':>14}{'gradients':>14}{'optimizer':>14}{'total':>14}",
    ]
    ddp = memory_use_of_ddp(layout, state_tensors or 0)
    text = functools.partial(_text, unit="MiB" if ddp.total_bytes >= 2**20 else "KiB")
    for name, row in (("megatron_ddp", use), ("ddp", ddp)):
        # A whole optimizer's state is unknown before its first step, and a guess would be read as a promise.
        known = state_tensors is not None
        state, total = (text(row.state_bytes), text(row.total_bytes)) if known else ("unknown", "unknown")
        lines.append(f"  {name:<16}{text(row.param_bytes):>14}{text(row.grad_bytes):>14}{state:>14}{total:>14}")
    if owners is not None and rank_of:
        lines += _describe_owners(owners)
    if use.host_bytes:
        lines.append(
            f"  the optimizer steps on the host, with {text(use.host_bytes)} of main params, gradients and state "
            "there, not counted above"
        )
    if layout.dp_size > 1:
        lines.append(
            f"  the end of the first backward needs {text(use.first_backward_bytes)} for parameters and gradients, "
            "which move into buffers then"
        )
    if layout.is_pooled:
        lines.append(
            "  gradients are pooled: reduced every microbatch (under no_sync too) into fp32 shards; while a backward "
            f"runs {text(use.staging_bytes)} of staging buffers and the gradients of incomplete buckets come on top"
        )
    return "\n".join(lines)


def _describe_owners(owners: Owners) -> list[str]:
    params = owners.layout.params
    loads = owners.owned_numels()
    mean = sum(loads) / len(loads)
    owned = [index for index, rank in owners.rank_of.items() if rank != EVERY_RANK]
    lines = []
    if num_replicated := len(owners.rank_of) - len(owned):
        lines.append(f"  {num_replicated:,} parameter(s) are stepped by every rank, which has all of their state")
    if not owned:
        return lines
    largest = params[max(owned, key=lambda index: params[index].numel)]
    lines.append(
        f"  {len(owned):,} parameter(s), {sum(loads):,} elements, are stepped whole, each by one rank that "
        f"owns it; the fullest rank has {max(loads) / max(mean, 1) - 1:+.0%}"
    )
    if largest.numel > 1.1 * mean:
        lines.append(
            f"  {largest.name!r} alone has {largest.numel:,} of them: a parameter group with an element-wise optimizer "
            "(AdamW) would divide it among the ranks"
        )
    return lines


def _text(num_bytes: int, unit: Literal["KiB", "MiB"]) -> str:
    return f"{num_bytes / {'KiB': 2**10, 'MiB': 2**20}[unit]:,.2f} {unit}"
