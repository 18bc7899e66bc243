"""Compares descriptions of all ranks, and finds the first difference."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence

from ..errors import LayoutMismatchError
from .interface import Collectives


def digest(description: Mapping[str, object]) -> bytes:
    """Returns 32 bytes that are equal on two ranks if and only if their descriptions (:meth:`BufferLayout.describe`)
    are."""
    return hashlib.sha256(json.dumps(description).encode()).digest()


def check_all_agree(description: Mapping[str, Sequence[object]], collectives: Collectives) -> None:
    """Raises LayoutMismatchError, on all ranks, with the first difference between their descriptions: JSON-able
    rows by heading. Collective."""
    descriptions = descriptions_if_different(description, collectives)
    if descriptions is not None:
        raise first_difference_error(descriptions)


def descriptions_if_different(
    description: Mapping[str, Sequence[object]], collectives: Collectives
) -> list[Mapping[str, Sequence[object]]] | None:
    """Returns every rank's description, by rank; None, on all ranks, if they are equal. Collective."""
    # 32 bytes first: the full description of a large model is megabytes, and almost always the same.
    if is_same_on_all_ranks(digest(description), collectives):
        return None
    return collectives.all_gather_objects(description)


def is_same_on_all_ranks(data: bytes, collectives: Collectives) -> bool:
    """Whether all ranks have the same bytes, of one length on all ranks. Collective."""
    # By a maximum, in log2(ranks) messages instead of a gather's ranks - 1: all bytes are equal if the largest of each
    # is also the smallest.
    largest = collectives.max_of_bytes([*data, *(255 - byte for byte in data)])
    return all(byte == 255 - other for byte, other in zip(largest[: len(data)], largest[len(data) :], strict=True))


def first_difference_error(descriptions: Sequence[Mapping[str, Sequence[object]]]) -> LayoutMismatchError:
    """Returns the error that names the first difference between the ranks' descriptions."""
    # Parameters come first, so the first difference is the cause and not one of its consequences.
    for what in descriptions[0]:
        for rank, theirs in enumerate(descriptions):
            pairs = itertools.zip_longest(descriptions[0][what], theirs[what], fillvalue="none")
            for expected, got in pairs:
                if expected != got:
                    return LayoutMismatchError(
                        "the ranks do not hold the same model or configuration. First difference, in the "
                        f"{what}: rank 0 has {expected}, rank {rank} has {got}. Build the same module, in the same "
                        "order and with the same frozen parameters and options, on every rank"
                    )
    raise AssertionError("digests differ but descriptions do not")
