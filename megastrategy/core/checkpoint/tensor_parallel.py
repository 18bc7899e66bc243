"""Joins the optimizer state of tensor ranks' parts to that of full parameters.

Each tensor rank has the state of its own parts on the first of its data-parallel ranks, gathered by
:mod:`~..optimizer.full_state`. The parts of each cut parameter are joined on the first tensor rank, some parameters at
a time. So a file is the same as without tensor parallelism. Loading cuts the state again.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..collectives import Collectives
from ..errors import CheckpointError
from ..module import CutParam
from ..states import gather_states


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
    entries: list[tuple[Any, str, tuple[int, ...], str]] = sorted(
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
    # By rank, too: its parts of one parameter are sent in rounds of their own.
    sent = {
        (key, ranks.rank): {name: values[key][name].detach().contiguous() for _, name, _, _ in of_key}
        for key, of_key in itertools.groupby(entries, lambda entry: entry[0])
    }
    parts_by_key: dict[Any, list[tuple[int, dict[str, Tensor]]]] = {}
    joined: dict[Any, Any] = {
        key: dict(values_of_key) if key in cut else values_of_key for key, values_of_key in values.items()
    }
    for (key, rank), parts in gather_states(sent, ranks.host, torch.device("cpu")):
        parts_by_key.setdefault(key, []).append((rank, parts))
        if len(parts_by_key[key]) == ranks.size:
            in_order = [of_rank for _, of_rank in sorted(parts_by_key.pop(key), key=lambda pair: pair[0])]
            for name in in_order[0]:
                joined[key][name] = torch.cat([of_rank[name] for of_rank in in_order], cut[key].dim)
    return joined if ranks.is_rank_zero else None
