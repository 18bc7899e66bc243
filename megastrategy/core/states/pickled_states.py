"""Sends state that may be any object from its owners to the ranks that need it, pickled.

The state of a parameter that is stepped whole may be factors of a matrix, lists, states quantised in blocks, objects.
So it is sent as ``torch.save`` would write it, a few parameters at a time.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..collectives import Collectives, bytes_of
from .mover import redistribute

_ROUND_BYTES = 2**26
"""An owner sends at least that much in a round, if it has that much, or one parameter's state."""

States = list[tuple[Any, Any]]
"""The states of parameters, each with a sortable key of its parameter."""


def packed(states: States) -> bytearray:
    """Returns states as bytes."""
    file = io.BytesIO()
    # A view would be written with all of its storage.
    torch.save([(key, tree_map(_without_other_elements, values)) for key, values in states], file)
    return bytearray(file.getbuffer())


def _without_other_elements(value: Any) -> Any:
    is_view = type(value) is Tensor and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_view else value


def gather_states(
    by_param: Mapping[Any, Any], ranks: Collectives, device: torch.device, receives: Sequence[bool] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yields every rank's states by parameter, in host memory, on ranks that receive them. Collective.

    Args:
        by_param: this rank's states, by parameter (index or name).
        device: of the tensors that ``ranks`` send.
        receives: by rank; None for rank 0 only.
    """
    receives = [rank == 0 for rank in range(ranks.size)] if receives is None else receives
    rounds = _rounds(by_param)
    while True:
        data = next(rounds, bytearray())
        sizes = [int.from_bytes(size, "little") for size in ranks.all_gather_bytes(len(data).to_bytes(8, "little"))]
        if not any(sizes):
            return
        starts = list(itertools.accumulate(sizes, initial=0))
        ranges = [(start, end) for start, end in itertools.pairwise(starts) if start < end]
        before = [[(start, end)] if start < end else [] for start, end in itertools.pairwise(starts)]
        after = [ranges if is_receiver else [] for is_receiver in receives]
        first = starts[ranks.rank]
        sent = torch.frombuffer(data or bytearray(1), dtype=torch.uint8)

        def read(start: int, end: int, sent: Tensor = sent, first: int = first) -> Tensor:
            return sent[start - first : end - first]

        for received in redistribute(read, before, after, ranks, torch.uint8, device, onto_host=True):
            # The bytes come from the group's own ranks and are trusted.
            yield from torch.load(io.BytesIO(bytes_of(received)), map_location="cpu", weights_only=False)


def entries_of_rank_zero(saved: Mapping[Any, Any], every: Sequence[Collection[Any]], ranks: Collectives) -> Any:
    """Returns ``saved``; where that is empty and rank 0's is not, rank 0's, in host memory. Collective.

    ``every``: the keys of all ranks.
    """
    lacks_some = [not keys and bool(every[0]) for keys in every]
    if not any(lacks_some):
        return saved
    sent = dict(enumerate(saved.values())) if ranks.is_rank_zero else {}
    received = dict(gather_states(sent, ranks.host, torch.device("cpu"), lacks_some))
    keys = list(every[0])
    return {keys[place]: value for place, value in received.items()} if lacks_some[ranks.rank] else saved


def _rounds(by_param: Mapping[Any, Any]) -> Iterator[bytearray]:
    states: States = []
    nbytes = 0
    for index, state in sorted(by_param.items()):
        states.append((index, state))
        values = state.values() if isinstance(state, Mapping) else [state]
        nbytes += sum(value.nbytes for value in values if isinstance(value, Tensor))
        if nbytes >= _ROUND_BYTES:
            yield packed(states)
            states, nbytes = [], 0
    if states:
        yield packed(states)
