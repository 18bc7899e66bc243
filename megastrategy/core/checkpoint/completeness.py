"""Tells whether all is there that a directory's metadata says, part by part and element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # see directory_reader
    from torch.distributed.checkpoint.metadata import Metadata


def describe_missing_file(places: Iterable[Any], size_of: Callable[[str], int | None]) -> str:
    """Says which file of a directory is missing or too short; empty if none.

    Args:
        places: of the values, as torch has them in ``Metadata.storage_data``: file, offset and length in bytes.
        size_of: the bytes of a file, by name; None if there is no such file.
    """
    ends: dict[str, int] = {}
    for place in places:
        # The furthest byte that is referred to: a file is shorter where a copy was broken off, and is named here.
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        size = size_of(name)
        if size is None:
            return f"{name} is missing"
        if size < end:
            return f"{name} is cut off after {size:,} of {end:,} bytes"
    return ""


def describe_missing_elements(metadata: Metadata) -> str:
    """Says which tensor is not all in the directory, and why; empty if none.

    A part that one rank saves without the others is alone in its directory. The format has no word for that, and its
    readers leave whatever was in memory in the place of the rest.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for name, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            continue
        numel, there = math.prod(saved.size), sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        if there < numel:
            return (
                f"it has {there:,} of the {numel:,} elements of {name}, and another rank had the rest. All ranks have "
                "to save together"
            )
    return ""
