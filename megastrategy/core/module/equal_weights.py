"""Compares weights that should be equal: all weights over data-parallel ranks, replicated ones over tensor ranks.

The engine keeps replicas equal. User code may not: it may write weights on one rank, or leave a module that gets a part
of the sequence out of ``parallelize_module``'s plan, so that its gradient differs between tensor ranks. The loss goes
down all the same, so that the fault stays unnoticed for long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import Parameter

from ..collectives import Collectives, digest_of
from ..errors import ReplicaMismatchError
from .local_parts import LocalParts
from .model_parallel import ModelParallel


def check_equal_weights(
    named: Mapping[str, Parameter], parts: LocalParts, model: ModelParallel, collectives: Collectives
) -> None:
    """Compares these weights bit by bit. Collective over all ranks of the model.

    Raises:
        ReplicaMismatchError: on all ranks, with the first parameter that differs.
    """
    groups = [(group, ranks) for group in model.groups if (ranks := group.ranks) is not None]
    if collectives.size == 1 and not groups:
        return
    own = {name: digest_of(parts.local_view(param)) for name, param in named.items()}
    by_replica = {model.replica_name(name, param): own[name] for name, param in named.items()}
    found = _first_difference(collectives.all_gather_objects(by_replica), "data-parallel rank")
    for group, ranks in groups:
        names = group.common_names(named)
        everybody = ranks.all_gather_objects((found, {common: own[name] for name, common in names.items()}))
        seen = [theirs for theirs, _ in everybody if theirs is not None]
        found = seen[0] if seen else _first_difference([digests for _, digests in everybody], group.rank_name)
    for ranks in (*model.collectives, collectives) if groups else ():
        # A difference that one group has found is not known to the others yet.
        found = next((theirs for theirs in ranks.all_gather_objects(found) if theirs is not None), None)
    if found is not None:
        raise ReplicaMismatchError(
            f"{found}. Weights are written on all ranks alike, or not at all; and a module that has a part of the "
            "sequence on each tensor rank is named in parallelize_module's plan (SequenceParallel())"
        )


def _first_difference(digests: Sequence[Mapping[str, str]], kind: str) -> str | None:
    first: dict[str, tuple[int, str]] = {}
    for rank, theirs in enumerate(digests):
        for name, digest in theirs.items():
            known, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                return f"parameter {name!r} has one value on {kind} {known} and another on {kind} {rank}"
    return None
