"""The one mover of state: sends ranges of an address space from the ranks that hold them to those that want them.

An address space is anything with 1-D addresses; here it is one buffer of the plan. It carries the gradients of whole
parameters to their owners, and state to the rank that saves it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..collectives import Collectives
from ..states import copy_to_host

Range = tuple[int, int]
Ranges = Sequence[Range]

ROUND_NUMEL = 2**24
"""The addresses that one collective covers, so that memory for messages is bounded: 64 MiB in fp32."""


def redistribute(
    read: Callable[[int, int], Tensor],
    held: Sequence[Ranges],
    wanted: Sequence[Ranges],
    ranks: Collectives,
    dtype: torch.dtype,
    device: torch.device,
    *,
    onto_host: bool = False,
    end: int = 0,
) -> list[Tensor]:
    """Returns the ranges that this rank wants, each as a 1-D tensor. Collective.

    Args:
        read: returns the elements ``[start, end)`` of one held range of this rank, 1-D.
        held: by rank, its ranges: sorted, each address at most once on all ranks together.
        wanted: by rank, its ranges: sorted, disjoint, and all of them held. Several ranks may want an address.
        onto_host: whether the result is in host memory; the device then needs memory for one round.
        end: rounds take place up to this address, wanted or not. Ranks with other experts send rounds of their own, and
            all ranks have to start the same number of collectives.
    """
    mine = wanted[ranks.rank]
    place = torch.device("cpu") if onto_host else device
    results = [torch.empty(end - start, dtype=dtype, device=place) for start, end in mine]
    empty = torch.empty(0, dtype=dtype, device=device)
    last = max((ranges[-1][1] for ranges in wanted if ranges), default=0)
    last = max(last, end)
    for start in range(0, last, ROUND_NUMEL):
        window = [(start, start + ROUND_NUMEL)]
        wanted_now = [intersect(ranges, window) for ranges in wanted]
        if any(wanted_now) or start < end:
            _send_round(read, held, wanted_now, mine, results, ranks, empty, onto_host)
    return results


def _send_round(
    read: Callable[[int, int], Tensor],
    held: Sequence[Ranges],
    wanted: Sequence[Ranges],
    mine: Ranges,
    results: Sequence[Tensor],
    ranks: Collectives,
    empty: Tensor,
    onto_host: bool,
) -> None:
    starts = [start for start, _ in mine]

    def write(ranges: Ranges, parts: Sequence[Tensor]) -> None:
        places = []
        for start, end in ranges:
            number = bisect.bisect_right(starts, start) - 1
            places.append(results[number][start - starts[number] : end - starts[number]])
        if onto_host:
            copy_to_host(parts, places)
        elif places:
            torch._foreach_copy_(places, list(parts))

    peers = [rank for rank in range(ranks.size) if rank != ranks.rank]
    local = intersect(held[ranks.rank], wanted[ranks.rank])
    write(local, [read(start, end) for start, end in local])
    if not peers:
        return
    sent = {rank: intersect(held[ranks.rank], wanted[rank]) for rank in peers}
    received = {rank: intersect(held[rank], wanted[ranks.rank]) for rank in peers}
    parts = [read(start, end).to(empty) for ranges in sent.values() for start, end in ranges]
    packed = torch.cat(parts) if parts else empty
    del parts
    sizes = [_numel(sent.get(rank, ())) for rank in range(ranks.size)]
    received_sizes = [_numel(received.get(rank, ())) for rank in range(ranks.size)]
    values = empty.new_empty(sum(received_sizes))
    ranks.all_to_all(values, packed, received_sizes, sizes).wait()
    if onto_host and values.numel():
        ranks.wait_for_device(empty.device, "all-to-all")  # the host copies next, and a rank may be gone
    ranges = [one for of_rank in received.values() for one in of_rank]
    write(ranges, values.split([end - start for start, end in ranges]))


def intersect(first: Ranges, second: Ranges) -> list[Range]:
    """Returns the addresses in both, which are sorted and disjoint each."""
    result = []
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def _numel(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)
