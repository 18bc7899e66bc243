"""Checks that a directory has all files and all elements that its metadata lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # see directory_reader
    from torch.distributed.checkpoint.metadata import Metadata


def describe_missing_file(places: Iterable[Any], size_of: Callable[[str], int | None]) -> str:
    """Says which file of a directory is missing or too short; empty if none.

    Args:
        places: file, offset and length in bytes of each value, from torch's ``Metadata.storage_data``.
        size_of: returns the bytes of a file by name; None if there is no such file.
    """
    ends: dict[str, int] = {}
    for place in places:
        # The last byte that is referred to: a file is shorter if a copy of it was interrupted.
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        size = size_of(name)
        if size is None:
            return f"{name} is missing"
        if size < end:
            return f"{name} is cut off after {size:,} of {end:,} bytes"
    return ""


def describe_missing_elements(metadata: Metadata) -> str:
    """Says which tensor is incomplete in the directory, and why; empty if none.

    If one rank saves without the others, the directory has only its parts. The format cannot express that, and its
    readers leave the rest of the target as it was in memory.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for name, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            continue
        numel = math.prod(saved.size)
        there = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        if there < numel:
            return (
                f"it has {there:,} of the {numel:,} elements of {name}, and another rank had the rest. All ranks have "
                "to save together"
            )
    return ""
