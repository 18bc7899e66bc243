"""Builds the plan of :mod:`.layout`: the sizes of buckets, the place of each parameter, the dtypes on the wire.

[Note: default bucket size]
The bucket that is filled last cannot overlap with backward, so its share of the traffic is always exposed: an eighth.
More buckets than that add latency and gain little, and below 2**18 elements (1 MB in fp32) a collective costs more in
latency than in bytes. From 320M elements on, an eighth is more than Megatron-LM's bucket size, which is used then.
The first three buckets are smaller, since the link is idle until the first one is complete; each of the next is
complete by the time that the one before it has been sent. (torch DDP begins with one small bucket for the same
reason.) Behind the next forward parameters are gathered in the reverse order, so that the last layers, and then
backward, wait for a small gather.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

import torch

from ..config import SHARD_OPTIONS, DistributedDataParallelConfig
from .domain import Domain
from .layout import (
    PARAM_ALIGNMENT_NUMEL,
    SIXTEEN_BIT_DTYPES,
    Bucket,
    Buffer,
    BufferLayout,
    ParamSlot,
    ParamSpec,
    bucket_alignment,
    round_up,
)
from .recurrent_weights import placement_units

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wire_dtype(config: DistributedDataParallelConfig, grad_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients are sent: a narrower one only where that rounds."""
    is_wide = grad_dtype.is_floating_point and grad_dtype.itemsize > 2
    return WIRE_DTYPES[config.grad_wire_dtype] if config.grad_wire_dtype is not None and is_wide else grad_dtype


MIN_FIRST_BUCKET_NUMEL = 2**17
"""A smaller bucket costs more in latency than it gains by being sent early."""


def default_bucket_size(total_numel: int, dp_size: int) -> int:
    """Returns the bucket size, in elements, for ``bucket_size=None``; see [Note: default bucket size]."""
    megatron = max(40_000_000, 1_000_000 * dp_size)
    return min(max(total_numel // 8, 2**18), megatron)


def minimum_numels(bucket_size: int) -> Iterator[int]:
    """Yields the minimum size of each bucket in launch order: an eighth, a quarter, a half, and then ``bucket_size``;
    see [Note: default bucket size]."""
    for divisor in (8, 4, 2):
        yield max(bucket_size // divisor, min(bucket_size, MIN_FIRST_BUCKET_NUMEL))
    yield from itertools.repeat(bucket_size)


def build_layout(
    specs: Sequence[ParamSpec],
    config: DistributedDataParallelConfig,
    dp_size: int,
    order: Sequence[int] | None = None,
) -> BufferLayout:
    """Places every parameter.

    Args:
        specs: trainable parameters in order of registration; a tied one is listed once.
        order: a permutation of the indices into ``specs``, beginning with the parameter whose gradient is complete
            first; None for the reverse of registration.

    Raises:
        ValueError: if two specs have one name, or the options do not fit the number of ranks.
    """
    domain = domain_of_all(config, dp_size)
    num_shards = domain.num_shards
    # Checkpoints and the digests that ranks compare identify parameters by name.
    repeated = [name for name, count in collections.Counter(spec.name for spec in specs).items() if count > 1]
    if repeated:
        raise ValueError(f"two parameters are called {repeated[0]!r}: names must be unique")
    size, are_alike = _bucket_size(config, sum(spec.reserved_numel for spec in specs), dp_size)
    alignment = bucket_alignment(dp_size, num_shards)

    order = range(len(specs))[::-1] if order is None else order
    assert sorted(order) == list(range(len(specs))), "every parameter has one place in the order"
    kind_of = [(spec.dtype, spec.grad_dtype, spec.domain or domain) for spec in specs]
    kinds = list(dict.fromkeys(kind_of))  # no set: ranks need one order
    numels = [0] * len(kinds)
    starts: dict[int, int] = {}
    drafts: list[tuple[int, int, int, tuple[int, ...]]] = []  # (buffer, start, end, params)
    for number, kind in enumerate(kinds):
        units = placement_units([s.chunk for s in specs], [i for i in order if kind_of[i] == kind])
        # The gradients at the start of each buffer arrive early, too.
        minimums = itertools.repeat(size) if are_alike else minimum_numels(size)
        minimum = next(minimums)
        bucket_start = 0
        position = 0
        current: list[int] = []
        for place, unit in enumerate(units):
            position = _place(specs, unit, round_up(position, PARAM_ALIGNMENT_NUMEL), starts)
            current += unit
            # The parameter that reaches the size closes the bucket: none is split, and no bucket is empty.
            is_border = any(specs[index].needs_own_bucket for near in units[place : place + 2] for index in near)
            if position - bucket_start >= minimum or place == len(units) - 1 or is_border:
                position = round_up(position, alignment)
                drafts.append((number, bucket_start, position, tuple(current)))
                minimum = next(minimums)
                bucket_start = position
                current = []
        numels[number] = position
    # A bucket is complete when its last parameter is, so that decides the launch order across dtypes.
    completed = {index: place for place, index in enumerate(order)}
    drafts.sort(key=lambda draft: max(completed[index] for index in draft[3]))
    buckets = tuple(Bucket(index, *draft, kinds[draft[0]][2]) for index, draft in enumerate(drafts))
    bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
    slots = tuple(
        ParamSlot(bucket_of[i].buffer, bucket_of[i].index, starts[i], starts[i] + spec.numel)
        for i, spec in enumerate(specs)
    )
    pooled = config.grad_buffer == "pooled" and num_shards > 1  # otherwise shards are as large as the gradients
    sums_in_fp32 = pooled or (config.reduce_scatter_with_fp32_accumulation and num_shards > 1)
    buffers = []
    for (dtype, grad_dtype, owners), numel in zip(kinds, numels, strict=True):
        sum_dtype = torch.float32 if sums_in_fp32 and grad_dtype in SIXTEEN_BIT_DTYPES else grad_dtype
        sent = wire_dtype(config, grad_dtype) if num_shards > 1 else grad_dtype
        # Pooled gradients need separate sums even if the dtypes agree: no gradient buffer exists to store them in.
        has_separate_sums = pooled or sum_dtype != sent
        buffers.append(Buffer(dtype, grad_dtype, numel, owners, sum_dtype, has_separate_sums, sent))
    return BufferLayout(
        params=tuple(specs),
        slots=slots,
        buffers=tuple(buffers),
        buckets=buckets,
        domain=domain,
        piece_numel=round_up(size, alignment) if pooled else None,
        offloads_state=config.offload_optimizer_states and num_shards > 1,
    )


def _place(specs: Sequence[ParamSpec], unit: Sequence[int], position: int, starts: dict[int, int]) -> int:
    """Places a parameter, or those of a chunk, from ``position`` on; returns their end."""
    numel = 0
    for index in unit:
        chunk = specs[index].chunk
        starts[index] = position + (0 if chunk is None else chunk.start)
        numel = specs[index].reserved_numel if chunk is None else chunk.numel
    return position + numel


def _bucket_size(config: DistributedDataParallelConfig, total_numel: int, dp_size: int) -> tuple[int, bool]:
    """Returns the size in elements, and whether all buckets have it: the user set it, or one contains all."""
    if config.bucket_size is not None:
        return config.bucket_size, True
    size = default_bucket_size(total_numel, dp_size)
    return size, size >= total_numel


def domain_of_all(config: DistributedDataParallelConfig, dp_size: int) -> Domain:
    """Returns the domain of parameters that all data-parallel ranks hold. Raises as :func:`build_layout`."""
    if dp_size < 1:
        raise ValueError(f"dp_size={dp_size}: expected at least one rank")
    instances = config.num_distributed_optimizer_instances
    # With an all-reduce every rank owns all of every bucket.
    if not config.use_distributed_optimizer:
        return Domain((tuple(range(dp_size)),), 1)
    if dp_size % instances != 0:
        divisors = ", ".join(str(n) for n in range(1, dp_size + 1) if dp_size % n == 0)
        raise ValueError(
            f"num_distributed_optimizer_instances={instances} does not divide the {dp_size} data-parallel rank(s), of "
            f"which every instance has as many. Pass one of {divisors}, or start another number of ranks"
        )
    # On one rank both have no effect and raise nothing, so that a script runs there unchanged.
    for name in SHARD_OPTIONS:
        value = getattr(config, name)
        if instances == dp_size > 1 and value not in (False, None, "contiguous"):
            raise ValueError(
                f"num_distributed_optimizer_instances={instances} on {dp_size} ranks contradicts {name}={value!r}: "
                "instances of one rank have no shards, and gradients are all-reduced. Pass fewer "
                "instances, or leave one of the two out"
            )
    return Domain((tuple(range(dp_size)),), dp_size // instances)
