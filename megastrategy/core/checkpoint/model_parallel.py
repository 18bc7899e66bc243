"""Saves and loads the optimizer of a model that several ranks share, in the form of a model on one rank.

Parts on tensor ranks are joined first, then the parameters of different ranks (:class:`~..module.GroupState`). Loading
divides them in the opposite order. On a rank with the whole model every function here returns its argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..collectives import CALL_ON_EVERY_RANK
from ..errors import CheckpointError
from ..optimizer import ShardedOptimizer
from ..states import MAIN_PARAMS, STATE, entries_of_rank_zero, number_params, state_by_number
from .tensor_parallel import join_parts

_MAIN = "main_param"
_CALL = "{} of the optimizer of a model that ranks share"


def whole_state(impl: ShardedOptimizer, gather: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the state of the whole model on the first rank of all. Collective over all ranks.

    On other ranks the state has only the parameters that each rank steps by itself. ``gather`` returns the state of
    this rank's parts on the first of its data-parallel ranks, and None elsewhere.

    Raises:
        NotOnAllRanksError: if only some ranks call this.
        CheckpointError: on all ranks with a state, if the states of ranks that share the model do not match.
    """
    if impl.engine.model_parallel.collectives:
        require_everybody(impl, _CALL.format(STATE))
    saved = gather()
    # None on the same data-parallel ranks of all that share the model.
    if saved["state"] is not None and impl.engine.local_parts.has_parts:
        saved = _state_of_whole_params(impl, saved)
    groups = impl.engine.model_parallel.states
    for group in groups:
        if saved["state"] is not None:
            saved = group.join(impl, saved)
    # Plain, so that a copy of it, a file, or a value of another container loads alike; see completed_state.
    if saved["state"] is None:
        extra_params = () if groups else impl.extra_params.params
        saved = {**saved, "state": state_by_number(impl.inner, extra_params)}
    return saved


def _state_of_whole_params(impl: ShardedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
    local_parts = impl.engine.local_parts
    numbers = number_params(impl.inner)
    params = {numbers[id(param)]: param for group in impl.inner.param_groups for param in group["params"]}
    # State that an optimizer has made of a DTensor at construction, and not stepped since, is a DTensor, too.
    state = {
        number: {name: local_parts.local_view(value) for name, value in values.items()} if number in params else values
        for number, values in saved["state"].items()
    }
    ranks = impl.engine.model_parallel.part_ranks
    whole = state if ranks is None else join_parts(state, local_parts.cut_params(params), ranks)
    return {**saved, "state": whole}


def whole_main_params(impl: ShardedOptimizer, gather: Callable[[], dict[str, Tensor] | None]) -> dict[str, Tensor]:
    """As :func:`whole_state`, for main params by name."""
    if impl.engine.model_parallel.collectives:
        require_everybody(impl, _CALL.format(MAIN_PARAMS))
    saved = gather()
    if saved is not None and (ranks := impl.engine.model_parallel.part_ranks) is not None:
        cut = impl.engine.local_parts.cut_params(impl.engine.named_params())
        joined = join_parts({name: {_MAIN: value} for name, value in saved.items()}, cut, ranks)
        saved = {name: values[_MAIN] for name, values in joined.items()} if joined is not None else None
    for group in impl.engine.model_parallel.states:
        if saved is not None:
            saved = group.join_main_params(saved)
    return {} if saved is None else saved


def completed_state(impl: ShardedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns ``saved``, completed on ranks where it only has parameters that each rank steps by itself. Collective.

    The other entries are the state of the first rank of all.

    Raises:
        NotOnAllRanksError, CheckpointError: as :func:`as_on_rank_zero`.
    """
    state = saved["state"]
    extra = set(map(id, impl.extra_params.params))
    params = _params_by_number(impl, saved) if extra else {}
    of_extra = {number: state[number] for number, param in params.items() if id(param) in extra and number in state}
    is_first = all(ranks.is_rank_zero for ranks in (*impl.engine.model_parallel.collectives, impl.engine.collectives))
    has_all = is_first or len(state) > len(of_extra)
    return {**saved, "state": {**as_on_rank_zero(impl, state if has_all else {}, STATE), **of_extra}}


def as_on_rank_zero(impl: ShardedOptimizer, saved: Mapping[Any, Any], what: str) -> Mapping[Any, Any]:
    """Returns ``saved``; on a rank where it is empty, that of the first rank of all. Collective over all ranks.

    :func:`whole_state` and :func:`whole_main_params` return nothing on other ranks than the first.

    Raises:
        NotOnAllRanksError: if only some ranks call this.
        CheckpointError: on all ranks, for a state whose entries differ between ranks.
    """
    require_everybody(impl, f"loading the {what} of a sharded optimizer")
    model_groups = impl.engine.model_parallel.collectives
    problem = ""
    for ranks in (*model_groups, impl.engine.collectives):
        reports = ranks.all_gather_objects((problem, list(saved)))
        every = [keys for _, keys in reports]
        # Main params by name may be on one rank only: those of a stage, or of a parameter that is frozen on one rank.
        problem = next((text for text, _ in reports if text), "") or (_difference(every) if what == STATE else "")
        if not problem:
            saved = entries_of_rank_zero(saved, every, ranks)
    for ranks in model_groups:  # a difference may be known only to some of their data-parallel ranks
        problem = next((text for text in ranks.all_gather_objects(problem) if text), "")
    if problem:
        raise CheckpointError(problem)
    return saved


def _difference(every: Sequence[Collection[Any]]) -> str:
    """Returns an error message for the first rank with keys that differ from the first rank's; "" if there is none."""
    for rank, keys in enumerate(every):
        if keys and (differing := set(keys) ^ set(every[0])):
            here, there = (rank, 0) if len(keys) > len(every[0]) else (0, rank)
            return (
                f"the state has an entry for parameter {min(differing, key=repr)!r} on rank {here} and none on rank "
                f"{there}, which would go on without it. Load the same state on every rank; nothing was loaded"
            )
    return ""


def parts_of_state(impl: ShardedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns this rank's parts of the whole model's state, as views. Collective over a pipeline's stages."""
    for group in impl.engine.model_parallel.states:
        saved = group.divide(impl, saved)
    cut = impl.engine.local_parts.cut_params(_params_by_number(impl, saved))
    if not cut:
        return saved
    state = {
        number: {name: cut[number].cut(value) for name, value in values.items()} if number in cut else values
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def _params_by_number(impl: ShardedOptimizer, saved: dict[str, Any]) -> dict[int, Parameter]:
    """Returns the parameters by their numbers in a saved state. Groups that do not match raise later, in loading."""
    return {
        number: param
        for stored, group in zip(saved["param_groups"], impl.inner.param_groups, strict=False)
        for number, param in zip(stored["params"], group["params"], strict=False)
    }


def parts_of_main_params(impl: ShardedOptimizer, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns this rank's parts of main params by name, as views of full tensors or DTensors."""
    for group in impl.engine.model_parallel.states:
        saved = group.divide_main_params(impl, saved)
    local_parts = impl.engine.local_parts
    if not local_parts.has_parts:
        return saved
    cut = impl.engine.local_parts.cut_params(impl.engine.named_params())
    parts = {name: local_parts.local_view(value) for name, value in saved.items()}
    return {name: cut[name].cut(part) if name in cut else part for name, part in parts.items()}


def require_everybody(impl: ShardedOptimizer, what: str, remedy: str = CALL_ON_EVERY_RANK) -> None:
    """Waits until all ranks of the model have reached the same call.

    Raises:
        NotOnAllRanksError: if they are not, within bounded time.
    """
    impl.engine.collectives.require_all_ranks(what, remedy)
    for ranks in impl.engine.model_parallel.collectives:
        ranks.require_all_ranks(what, remedy)
