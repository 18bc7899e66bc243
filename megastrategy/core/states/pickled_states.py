"""Sends state that may be any object from its owners to rank 0, or from rank 0 to the others, pickled.

The state of a parameter that is stepped whole may be factors of a matrix, lists, states quantised in blocks, objects.
So it is sent as ``torch.save`` would write it, a few parameters at a time.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..collectives import Collectives, bytes_of

_ROUND_BYTES = 2**26
"""An owner sends at least that much in a round, if it has that much, or one parameter's state."""

States = list[tuple[Any, Mapping[str, Any]]]
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


def unpacked(data: Any) -> States:
    """Reverses :func:`packed`, into host memory. The bytes come from the group's own ranks and are trusted."""
    states: States = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return states


def gather_states(
    by_param: Mapping[Any, Mapping[str, Any]], collectives: Collectives, device: torch.device
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yields every owner's states on rank 0, by parameter, and nothing on other ranks. Collective over the owners.

    ``by_param``: by parameter (index or name). ``device``: of the tensors that ``collectives`` send.
    """
    rounds = _rounds(by_param)
    while True:
        data = next(rounds, bytearray())
        sizes = [
            int.from_bytes(size, "little") for size in collectives.all_gather_bytes(len(data).to_bytes(8, "little"))
        ]
        if not any(sizes):
            return
        is_first = collectives.rank == 0
        if is_first and data:
            yield from unpacked(data)
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        sent = torch.frombuffer(data, dtype=torch.uint8).to(device) if data and not is_first else nothing
        coming = [0, *sizes[1:]] if is_first else [0] * len(sizes)
        received = nothing.new_empty(sum(coming))
        collectives.all_to_all(received, sent, coming, [sent.numel(), *[0] * (len(sizes) - 1)]).wait()
        if is_first:
            collectives.wait_for_device(device, "all-to-all")
            for part in received.cpu().split(coming):
                if part.numel():
                    yield from unpacked(bytes_of(part))


def entries_of_rank_zero(saved: Mapping[Any, Any], every: Sequence[Collection[Any]], ranks: Collectives) -> Any:
    """Returns ``saved``; where that is empty and rank 0's is not, rank 0's, in host memory. Collective.

    ``every``: the keys of all ranks.
    """
    lacks_some = [not keys and bool(every[0]) for keys in every]
    if not any(lacks_some):
        return saved
    found: list[tuple[Any, Any]] = []
    rounds = _rounds(dict(enumerate(saved.values())) if ranks.is_rank_zero else {})
    while True:
        data = next(rounds, bytearray())
        size = int.from_bytes(ranks.all_gather_bytes(len(data).to_bytes(8, "little"))[0], "little")
        if not size:
            break
        sent = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8, device="cpu")
        ranks.host.broadcast(sent).wait()
        if lacks_some[ranks.rank]:
            found += unpacked(bytes_of(sent))
    keys = list(every[0])
    return {keys[place]: value for place, value in found} if lacks_some[ranks.rank] else saved


def gather_states_everywhere(
    by_param: Mapping[Any, Mapping[str, Any]], collectives: Collectives
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yields every owner's states on every rank; see :func:`gather_states`. Collective, between hosts."""
    rounds = _rounds(by_param)
    while any(parts := collectives.all_gather_bytes(bytes(next(rounds, b"")))):
        for data in filter(None, parts):
            yield from unpacked(data)


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
