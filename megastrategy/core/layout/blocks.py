"""Neighbouring parts of parameters, which an optimizer steps as one tensor."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from .. import devices
from .layout import Bucket, BufferLayout, Part

Group = TypeVar("Group", bound=Hashable)

HOST_BLOCK_NUMEL = 2**17
"""The largest run on the host: Adam's four tensors then take 2 MB in fp32, about a core's second-level cache. A longer
one leaves the cache in each operation of a foreach step."""


def block_numel(layout: BufferLayout, device: torch.device) -> int:
    """Returns the largest number of elements that are stepped as one tensor."""
    if devices.is_on_host(device):
        return HOST_BLOCK_NUMEL
    return HOST_BLOCK_NUMEL * torch.get_num_threads() if layout.offloads_state else 2**62


def neighbours(
    layout: BufferLayout,
    bucket: Bucket,
    rank: int,
    groups: Mapping[int, Group],
    owners: Collection[int],
    max_numel: int,
    joined: Collection[Group],
) -> Iterable[tuple[Group, list[Part]]]:
    """Yields a rank's parts of a bucket's parameters, those that are stepped as one tensor together, with their group.

    Args:
        groups: by parameter, its group; others are not stepped.
        owners: parameters that are stepped whole, which are not yielded.
        joined: the groups in which neighbours may be one tensor, and a parameter two.
    """

    def group_of(param: int) -> Group | None:
        return None if param in owners else groups.get(param)

    for group, params in itertools.groupby(bucket.params, group_of):
        if group is None:
            continue
        spans = [(param, layout.owned_range(param, rank)) for param in params]
        parts = [Part(param, *span) for param, span in spans if span is not None]
        if group not in joined:
            yield from ((group, [part]) for part in parts)
            continue
        for block in _blocks([part for part in parts if part.start < part.end], max_numel):
            yield group, block
        yield from ((group, [part]) for part in parts if part.start == part.end)


def _blocks(parts: Sequence[Part], numel: int) -> Iterable[list[Part]]:
    """Cuts neighbouring parts into blocks of so many elements."""
    blocks: dict[int, list[Part]] = {}
    for part in parts:
        first = parts[0].start
        for number in range((part.start - first) // numel, (part.end - 1 - first) // numel + 1):
            start = max(part.start, first + number * numel)
            end = min(part.end, first + (number + 1) * numel)
            blocks.setdefault(number, []).append(Part(part.param, start, end))
    return blocks.values()
