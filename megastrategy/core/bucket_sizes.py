"""The sizes of buckets where the user gives none.

[Note: default bucket size]
The bucket that is filled last cannot overlap with backward, so its share of the traffic is always exposed: an eighth.
More buckets than that pay latency for little, and below 2**18 elements (1 MB in fp32) a collective costs more in
latency than in bytes. From 320M elements on an eighth is more than Megatron-LM's bucket, which then holds. The first
three buckets are smaller, since the link has nothing to do until the first is complete; each of the next is there by
the time that the one before it has been sent. (torch DDP begins with one small bucket for the same reason.) Behind the
next forward parameters are gathered the other way round, so that the last layers, and then backward, wait for a small
gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

MIN_FIRST_BUCKET_NUMEL = 2**17
"""A smaller bucket costs more in latency than it gains by being early."""


def default_bucket_size(total_numel: int, dp_size: int) -> int:
    """The bucket size, in elements, for ``bucket_size=None``; see [Note: default bucket size]."""
    megatron = max(40_000_000, 1_000_000 * dp_size)
    return min(max(total_numel // 8, 2**18), megatron)


def minimum_numels(bucket_size: int) -> Iterator[int]:
    """Yields the least size of each bucket in launch order: an eighth, a quarter, a half, and then all of
    ``bucket_size``; see [Note: default bucket size]."""
    for divisor in (8, 4, 2):
        yield max(bucket_size // divisor, min(bucket_size, MIN_FIRST_BUCKET_NUMEL))
    yield from itertools.repeat(bucket_size)
