"""Joins the optimizer state of tensor ranks' parts to that of full parameters.

Each tensor rank has the state of its own parts on the first of its data-parallel ranks, gathered by
:mod:`~..optimizer.state`. The parts of each cut parameter are joined on the first tensor rank, one tensor at a time.
So a file is the same as without tensor parallelism. Loading cuts the state again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..collectives import Collectives
from ..errors import CheckpointError
from ..module import CutParam


def join_parts(
    values: Mapping[Hashable, Mapping[str, Any]], cut: Mapping[Any, CutParam], ranks: Collectives
) -> Mapping[Any, Any] | None:
    """Returns the values with joined parts on the first tensor rank; None elsewhere. Collective over the tensor ranks.

    Args:
        values: by parameter and name, in host memory. Equal keys and names on all tensor ranks.
        cut: the parameters that are cut. Values of other shapes than their parts' are the first rank's.

    Raises:
        CheckpointError: on all tensor ranks, if their values do not match.
    """
    entries = sorted(
        (key, name, tuple(value.shape), str(value.dtype))
        for key in values.keys() & cut.keys()
        for name, value in values[key].items()
        if isinstance(value, Tensor) and tuple(value.shape) == cut[key].part_shape
    )
    entries_by_rank: list[list[tuple[Any, str, tuple[int, ...], str]]] = ranks.all_gather_objects(entries)
    for rank, of_rank in enumerate(entries_by_rank):
        # Parts may have different sizes. Everything else must be equal, or the exchanges below would not match.
        if [(key, name, dtype) for key, name, _, dtype in of_rank] != [
            (k, n, dtype) for k, n, _, dtype in entries_by_rank[0]
        ]:
            raise CheckpointError(
                f"tensor ranks 0 and {rank} keep other state of the same parameters, so that it cannot be joined: "
                f"{len(entries_by_rank[0])} and {len(of_rank)} tensors. Step the optimizer on all ranks, or on none"
            )
    joined: dict[Any, Any] = {
        key: dict(values_of_key) if key in cut else values_of_key for key, values_of_key in values.items()
    }
    for number, (key, name, _, _) in enumerate(entries):
        part = joined[key][name]
        shapes = [of_rank[number][2] for of_rank in entries_by_rank]
        joined[key][name] = _join(part.detach().cpu().contiguous(), shapes, cut[key].dim, ranks.host)
    return joined if ranks.is_rank_zero else None


def _join(part: Tensor, shapes: list[tuple[int, ...]], dim: int, hosts: Collectives) -> Tensor:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    is_first = hosts.is_rank_zero
    coming = [0, *sizes[1:]] if is_first else [0] * len(sizes)
    received = part.new_empty(sum(coming))
    sent = part.new_empty(0) if is_first else part.flatten()
    hosts.all_to_all(received, sent, coming, [sent.numel(), *[0] * (len(sizes) - 1)]).wait()
    if not is_first:
        return part
    parts = received.split(coming)
    return torch.cat([part, *(parts[rank].view(shapes[rank]) for rank in range(1, len(shapes)))], dim)
