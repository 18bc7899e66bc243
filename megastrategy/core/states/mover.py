"""The one mover of state: sends ranges of an address space from the ranks that hold them to those that want them.

An address space is anything with 1-D addresses. A buffer of the plan is one: the gradients of whole parameters go to
their owners. The element-wise values of a state, one after the other, are another: they go to the rank that saves them,
to all ranks, or to the owners of a new plan. The bytes of pickled values are the third.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import Collectives
from .host_copies import copy_to_host

Range = tuple[int, int]
Ranges = Sequence[Range]

ROUND_NUMEL = 2**24
"""The addresses that one collective covers, so that memory for messages is bounded: 64 MiB in fp32."""


class Parts(list[tuple[int, Tensor]]):
    """The parts of an element-wise value on this rank: the number of the first element, and a 1-D tensor, in order."""

    def joined(self) -> Tensor:
        """Returns one tensor of all parts, which are neighbours; itself if there is one."""
        return self[0][1] if len(self) == 1 else torch.cat([values for _, values in self])


LocalState = dict[int, dict[str, Any]]
"""A state outside of a step, by parameter in the layout and by name: this rank's Parts of element-wise values, other
values as they are."""

Owners = Callable[[int], Iterable[tuple[int, int, int]]]
"""Returns the owners of a parameter: rank, and the elements ``[start, end)`` that it has."""


def redistribute_state(
    local: LocalState,
    dtypes: Mapping[int, Mapping[str, torch.dtype]],
    numel_of: Callable[[int], int],
    owned_before: Owners,
    owned_after: Owners,
    ranks: Collectives,
    device: torch.device,
    *,
    onto_host: bool = False,
) -> LocalState:
    """Sends element-wise values from the ranks that own them to those that shall. Collective.

    The values of one dtype are one address space, so that thousands of small ones are sent in a few messages.

    Args:
        local: this rank's state; it has all parts that it owns.
        dtypes: of the values to send, by parameter and name; equal on all ranks.
        numel_of: returns the elements of a parameter.
        onto_host: as in :func:`redistribute`.
    """
    entries_by_dtype: dict[torch.dtype, list[tuple[int, str]]] = {}
    for index, of_param in sorted(dtypes.items()):
        for key, dtype in sorted(of_param.items()):
            entries_by_dtype.setdefault(dtype, []).append((index, key))
    sent: LocalState = {index: {key: Parts() for key in of_param} for index, of_param in dtypes.items()}
    for dtype, entries in sorted(entries_by_dtype.items(), key=lambda pair: str(pair[0])):
        starts = list(itertools.accumulate((numel_of(index) for index, _ in entries), initial=0))
        before: list[list[Range]] = [[] for _ in range(ranks.size)]
        after: list[list[Range]] = [[] for _ in range(ranks.size)]
        parts: list[tuple[int, Tensor]] = []
        for (index, key), first in zip(entries, starts, strict=False):
            for ranges, owners in ((before, owned_before), (after, owned_after)):
                for rank, start, end in owners(index):
                    if start < end:
                        ranges[rank].append((first + start, first + end))
            parts += [(first + start, values) for start, values in local.get(index, {}).get(key, ())]
        values = redistribute(_reader(parts), before, after, ranks, dtype, device, onto_host=onto_host, end=starts[-1])
        for (start, _), value in zip(after[ranks.rank], values, strict=True):
            place = bisect.bisect_right(starts, start) - 1
            index, key = entries[place]
            sent[index][key].append((start - starts[place], value))
    return sent


def _reader(parts: Sequence[tuple[int, Tensor]]) -> Callable[[int, int], Tensor]:
    """Returns a function that reads a range from parts with these addresses."""
    parts = sorted((pair for pair in parts if pair[1].numel()), key=lambda pair: pair[0])
    starts = [start for start, _ in parts]

    def read(start: int, end: int) -> Tensor:
        place = bisect.bisect_right(starts, start) - 1
        pieces = []
        while place < len(parts) and starts[place] < end:
            first, part = parts[place]
            pieces.append(part[max(start - first, 0) : end - first])
            place += 1
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    return read


def redistribute(
    read: Callable[[int, int], Tensor],
    before: Sequence[Ranges],
    after: Sequence[Ranges],
    ranks: Collectives,
    dtype: torch.dtype,
    device: torch.device,
    *,
    onto_host: bool = False,
    end: int = 0,
) -> list[Tensor]:
    """Returns the ranges that this rank gets, each as a 1-D tensor. Collective.

    Args:
        read: returns the elements ``[start, end)`` of one range that this rank has before, 1-D.
        before: by rank, the ranges that it has: sorted, each address at most once on all ranks together.
        after: by rank, the ranges that it gets: sorted, disjoint, and there before. Several ranks may get an address.
        onto_host: whether the result is in host memory; the device then needs memory for one round.
        end: rounds take place up to this address, whether ranks get elements or not: ranks of other instances, or
            with other experts, have to start as many collectives.
    """
    mine = after[ranks.rank]
    place = torch.device("cpu") if onto_host else device
    results = [torch.empty(end - start, dtype=dtype, device=place) for start, end in mine]
    empty = torch.empty(0, dtype=dtype, device=device)
    last = max((ranges[-1][1] for ranges in after if ranges), default=0)
    last = max(last, end)
    for start in range(0, last, ROUND_NUMEL):
        window = [(start, start + ROUND_NUMEL)]
        in_round = [intersect(ranges, window) for ranges in after]
        if any(in_round) or start < end:
            _send_round(read, before, in_round, mine, results, ranks, empty, onto_host)
    return results


def _send_round(
    read: Callable[[int, int], Tensor],
    before: Sequence[Ranges],
    after: Sequence[Ranges],
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
    local = intersect(before[ranks.rank], after[ranks.rank])
    write(local, [read(start, end) for start, end in local])
    if not peers:
        return
    sent = {rank: intersect(before[ranks.rank], after[rank]) for rank in peers}
    received = {rank: intersect(before[rank], after[ranks.rank]) for rank in peers}
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
