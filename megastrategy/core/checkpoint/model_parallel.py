"""Saves and loads the optimizer of a model that several ranks share as that of one rank that has all of it.

Parts on tensor ranks are joined first, then the parameters of ranks that have others (:class:`~..module.GroupState`);
loading goes the other way. Where a rank has the whole model every function here returns its argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..collectives import CALL_ON_EVERY_RANK
from ..errors import CheckpointError
from ..module import CutParam
from ..optimizer import ShardSet
from ..shards import MAIN_PARAMS, REMAINDER, STATE, entries_of_rank_zero, number_params, state_by_number
from .tensor_parallel import join_parts

_MAIN = "main_param"
_CALL = "{} of the optimizer of a model that ranks share"


def whole_state(impl: ShardSet, gather: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """``gather`` returns the state of this rank's parts, on the first of its data-parallel ranks, and None in its place
    elsewhere; returned is that of the whole model, on the first of all, and elsewhere that of the parameters that each
    rank steps by itself. Collective over all ranks.

    Raises:
        NotOnAllRanksError: if a rank calls it alone.
        CheckpointError: on all ranks that have a state, if ranks of the model have other things in it.
    """
    if impl.engine.model_parallel.collectives:
        require_everybody(impl, _CALL.format(STATE))
    saved = gather()
    # None on all ranks of the model that those data-parallel ranks have alike.
    if saved["state"] is not None and impl.engine.local_parts.has_parts:
        saved = _state_of_whole_params(impl, saved)
    others = impl.engine.model_parallel.states
    for group in others:
        if saved["state"] is not None:
            saved = group.join(impl, saved)
    # Plain, so that a copy of it, a file, or a value of another container loads alike; see completed_state.
    if saved["state"] is None:
        own = () if others else impl.extra_params.params
        saved = {**saved, "state": state_by_number(impl.inner, own)}
    return saved


def _state_of_whole_params(impl: ShardSet, saved: dict[str, Any]) -> dict[str, Any]:
    local_parts, numbers = impl.engine.local_parts, number_params(impl.inner)
    params = {numbers[id(param)]: param for group in impl.inner.param_groups for param in group["params"]}
    # What an optimizer made of a DTensor at construction, and keeps while that is frozen, is a DTensor, too.
    state = {
        number: {name: local_parts.local_view(value) for name, value in kept.items()} if number in params else kept
        for number, kept in saved["state"].items()
    }
    ranks = impl.engine.model_parallel.tensor_ranks
    whole = state if ranks is None else join_parts(state, local_parts.cut_params(params), ranks)
    return {**saved, "state": whole}


def has_main_params(impl: ShardSet, is_here: bool) -> bool:
    """Whether some rank of the model has main params; ``is_here``: this one has. Collective over a pipeline's ranks."""
    if not impl.engine.model_parallel.states:
        return is_here
    require_everybody(impl, _CALL.format(MAIN_PARAMS))
    # A stage that is frozen has none, and takes part.
    for group in impl.engine.model_parallel.groups:
        if group.state is not None and group.ranks is not None:
            is_here = group.ranks.host.max_of_bytes([is_here]) == [1]
    return is_here


def whole_main_params(impl: ShardSet, gather: Callable[[], dict[str, Tensor] | None]) -> dict[str, Tensor]:
    """As :func:`whole_state`, for main params by name."""
    if impl.engine.model_parallel.collectives:
        require_everybody(impl, _CALL.format(MAIN_PARAMS))
    saved = gather()
    if saved is not None and (ranks := impl.engine.model_parallel.tensor_ranks) is not None:
        cut = _cut_by_saved_name(impl)
        joined = join_parts({name: {_MAIN: value} for name, value in saved.items()}, cut, ranks)
        saved = {name: kept[_MAIN] for name, kept in joined.items()} if joined is not None else None
    for group in impl.engine.model_parallel.states:
        if saved is not None:
            saved = group.join_main_params(saved)
    return {} if saved is None else saved


def completed_state(impl: ShardSet, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns ``saved``, completed on ranks where it only has parameters that each rank steps by itself. Collective.

    The other entries are the state of the first rank of all.

    Raises:
        NotOnAllRanksError, CheckpointError: as :func:`as_on_rank_zero`.
    """
    state, extra = saved["state"], set(map(id, impl.extra_params.params))
    params = _params_by_number(impl, saved) if extra else {}
    own = {number: state[number] for number, param in params.items() if id(param) in extra and number in state}
    is_first = all(ranks.is_rank_zero for ranks in (*impl.engine.model_parallel.collectives, impl.engine.collectives))
    has_all = is_first or len(state) > len(own)
    return {**saved, "state": {**as_on_rank_zero(impl, state if has_all else {}, STATE), **own}}


def as_on_rank_zero(impl: ShardSet, saved: Mapping[Any, Any], what: str) -> Mapping[Any, Any]:
    """Returns ``saved``; on a rank where it is empty, that of the first rank of all: :func:`whole_state` and
    :func:`whole_main_params` return nothing elsewhere. Collective over all ranks.

    Raises:
        NotOnAllRanksError: if a rank calls it alone.
        CheckpointError: on all ranks, for a state that has other entries on one of them.
    """
    require_everybody(impl, f"loading the {what} of a sharded optimizer")
    model_groups, problem = impl.engine.model_parallel.collectives, ""
    for ranks in (*model_groups, impl.engine.collectives):
        told = ranks.all_gather_objects((problem, list(saved)))
        every = [keys for _, keys in told]
        # Main params are by name: those of a stage, and of a parameter that is frozen on one, may be on one rank alone.
        problem = next((text for text, _ in told if text), "") or (_difference(every) if what == STATE else "")
        if not problem:
            saved = entries_of_rank_zero(saved, every, ranks)
    for ranks in model_groups:  # whose other data-parallel ranks may have found one
        problem = next((text for text in ranks.all_gather_objects(problem) if text), "")
    if problem:
        raise CheckpointError(problem)
    return saved


def _difference(every: Sequence[Collection[Any]]) -> str:
    """Says which rank has other keys than the first one, of those that have any; "" if none has."""
    for rank, keys in enumerate(every):
        if keys and (differing := set(keys) ^ set(every[0])):
            here, there = (rank, 0) if len(keys) > len(every[0]) else (0, rank)
            return (
                f"the state has an entry for parameter {min(differing, key=repr)!r} on rank {here} and none on rank "
                f"{there}, which would go on without it. Load the same state on every rank; nothing was loaded"
            )
    return ""


def parts_of_state(impl: ShardSet, saved: dict[str, Any]) -> dict[str, Any]:
    """This rank's parts of the whole model's state: views. Collective over a pipeline's stages."""
    for group in impl.engine.model_parallel.states:
        saved = group.divide(impl, saved)
    if not (cut := impl.engine.local_parts.cut_params(_params_by_number(impl, saved))):
        return saved
    state = {
        number: {name: cut[number].cut(value) for name, value in kept.items()} if number in cut else kept
        for number, kept in saved["state"].items()
    }
    return {**saved, "state": state}


def _params_by_number(impl: ShardSet, saved: dict[str, Any]) -> dict[int, Parameter]:
    """The parameters by their numbers in a saved state. What loads it says where groups do not fit."""
    return {
        number: param
        for stored, group in zip(saved["param_groups"], impl.inner.param_groups, strict=False)
        for number, param in zip(stored["params"], group["params"], strict=False)
    }


def parts_of_main_params(impl: ShardSet, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of main params by name, whole ones or DTensors: views."""
    for group in impl.engine.model_parallel.states:
        saved = group.divide_main_params(impl, saved)
    local_parts = impl.engine.local_parts
    if not local_parts.has_parts:
        return saved
    cut, parts = _cut_by_saved_name(impl), {name: local_parts.local_view(value) for name, value in saved.items()}
    return {name: cut[name].cut(part) if name in cut else part for name, part in parts.items()}


def _cut_by_saved_name(impl: ShardSet) -> dict[str, CutParam]:
    """The parameters that are cut, by either name that their main params may be saved under."""
    cut = impl.engine.local_parts.cut_params(impl.engine.named_params())
    return cut | {name + REMAINDER: part for name, part in cut.items()}


def require_everybody(impl: ShardSet, what: str, remedy: str = CALL_ON_EVERY_RANK) -> None:
    """Returns when all data-parallel ranks, and all that share the model, are about to do the same.

    Raises:
        NotOnAllRanksError: if they are not, within bounded time.
    """
    impl.engine.collectives.require_all_ranks(what, remedy)
    for ranks in impl.engine.model_parallel.collectives:
        ranks.require_all_ranks(what, remedy)
