"""Compares weights that ranks should hold alike: all of them over data-parallel ranks, whole ones over tensor ranks.

Nothing in the engine lets replicas part. What may is a user's own: weights that are written on one rank, or a parameter
outside of ``parallelize_module``'s plan that is used on a part of the sequence alone, so that its gradient is another
on each tensor rank. The loss goes down all the same, and it is not noticed for long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import Parameter

from ..collectives import Collectives, digest_of
from ..errors import ReplicaMismatchError
from .local_parts import LocalParts
from .model_parallel import ModelParallel


def check_replicas(
    named: Mapping[str, Parameter], parts: LocalParts, model: ModelParallel, collectives: Collectives
) -> None:
    """Returns if these weights are equal to the bit wherever they should be. Collective over all ranks of the mesh.

    Raises:
        ReplicaMismatchError: on all of them, with the first parameter that differs.
    """
    groups = [(group, ranks) for group in model.groups if (ranks := group.ranks) is not None]
    if collectives.size == 1 and not groups:
        return
    own = {name: digest_of(parts.local_view(param)) for name, param in named.items()}
    found = _first_difference(collectives.all_gather_objects(own), "data-parallel rank")
    for group, ranks in groups:
        names = group.common_names(named)
        everybody = ranks.all_gather_objects((found, {common: own[name] for name, common in names.items()}))
        seen = [theirs for theirs, _ in everybody if theirs is not None]
        found = seen[0] if seen else _first_difference([digests for _, digests in everybody], group.rank_name)
    for ranks in (*model.collectives, collectives) if groups else ():
        # one group's, which the others do not know of yet
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
