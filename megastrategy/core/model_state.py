"""Saves and loads the optimizer of a model that several ranks share as that of one rank that has all of it.

The parts of what tensor ranks have cut come together first, then what the stages have; loading goes the other way.
Every function here hands on what it gets where a rank has the whole model. See checkpoint.tensor_ranks and stage_state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import stage_state
from .checkpoint.full_state import REMAINDER, OnRankZero, number_params
from .checkpoint.hand_over import MAIN_PARAMS, STATE
from .checkpoint.tensor_ranks import join_parts
from .local_parts import CutParam
from .sharded_step import ShardedStep

_MAIN = "main_param"
_CALL = "{} of the optimizer of a model that ranks share"


def whole_state(impl: ShardedStep, gather: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """``gather`` returns the state of this rank's parts, on the first of its data-parallel ranks; returned is that of
    the whole model, on the first of all. Collective over all ranks.

    Raises:
        NotOnAllRanksError: if a rank calls it alone.
        CheckpointError: on all ranks that have a state, if ranks of the model have other things in it.
    """
    if impl.engine.local_parts.model_groups:
        require_everybody(impl, _CALL.format(STATE))
    saved = gather()
    # Elsewhere is nothing, on all ranks of the model that those data-parallel ranks have alike.
    if not isinstance(saved["state"], OnRankZero) and impl.engine.local_parts.has_parts:
        saved = _state_of_whole_params(impl, saved)
    if not isinstance(saved["state"], OnRankZero) and stage_state.is_staged(impl):
        saved = stage_state.whole_state(impl, saved)
    return saved


def _state_of_whole_params(impl: ShardedStep, saved: dict[str, Any]) -> dict[str, Any]:
    local_parts, numbers = impl.engine.local_parts, number_params(impl.inner)
    params = {numbers[id(param)]: param for group in impl.inner.param_groups for param in group["params"]}
    # What an optimizer made of a DTensor at construction, and keeps while that is frozen, is a DTensor, too.
    state = {
        number: {name: local_parts.of(value) for name, value in kept.items()} if number in params else kept
        for number, kept in saved["state"].items()
    }
    ranks = local_parts.tensor_ranks
    whole = state if ranks is None else join_parts(state, local_parts.cut_params(params), ranks)
    return {**saved, "state": whole}


def has_main_params(impl: ShardedStep, is_here: bool) -> bool:
    """Whether some rank of the model has main params; ``is_here``: this one has. Collective over a pipeline's ranks."""
    if not stage_state.is_staged(impl):
        return is_here
    require_everybody(impl, _CALL.format(MAIN_PARAMS))
    return stage_state.is_on_any_stage(impl, is_here)


def whole_main_params(impl: ShardedStep, gather: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """As :func:`whole_state`, for main params by name."""
    if impl.engine.local_parts.model_groups:
        require_everybody(impl, _CALL.format(MAIN_PARAMS))
    saved = gather()
    if not isinstance(saved, OnRankZero) and (ranks := impl.engine.local_parts.tensor_ranks) is not None:
        cut = _cut_by_saved_name(impl)
        joined = join_parts({name: {_MAIN: value} for name, value in saved.items()}, cut, ranks)
        saved = {name: kept[_MAIN] for name, kept in joined.items()} if ranks.is_rank_zero else OnRankZero()
    if not isinstance(saved, OnRankZero) and stage_state.is_staged(impl):
        saved = stage_state.whole_main_params(impl, saved)
    return saved


def parts_of_state(impl: ShardedStep, saved: dict[str, Any]) -> dict[str, Any]:
    """This rank's parts of the whole model's state: views. Collective over a pipeline's stages."""
    if stage_state.is_staged(impl):
        saved = stage_state.state_of_stage(impl, saved)
    params = {
        number: param
        for stored, group in zip(saved["param_groups"], impl.inner.param_groups, strict=False)
        for number, param in zip(stored["params"], group["params"], strict=False)
    }
    # Groups that do not fit are told of by what loads the parts.
    if not (cut := impl.engine.local_parts.cut_params(params)):
        return saved
    state = {
        number: {name: cut[number].cut(value) for name, value in kept.items()} if number in cut else kept
        for number, kept in saved["state"].items()
    }
    return {**saved, "state": state}


def parts_of_main_params(impl: ShardedStep, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of main params by name, whole ones or DTensors: views."""
    if stage_state.is_staged(impl):
        saved = stage_state.main_params_of_stage(impl, saved)
    local_parts = impl.engine.local_parts
    if not local_parts.has_parts:
        return saved
    cut, parts = _cut_by_saved_name(impl), {name: local_parts.of(value) for name, value in saved.items()}
    return {name: cut[name].cut(part) if name in cut else part for name, part in parts.items()}


def _cut_by_saved_name(impl: ShardedStep) -> dict[str, CutParam]:
    """The parameters that are cut, by either name that their main params may be saved under."""
    cut = impl.engine.local_parts.cut_params(dict(impl.engine.module.named_parameters()))
    return cut | {name + REMAINDER: part for name, part in cut.items()}


def require_everybody(impl: ShardedStep, what: str) -> None:
    """Returns when all data-parallel ranks, and all that share the model, are about to do the same.

    Raises:
        NotOnAllRanksError: if they are not, within bounded time.
    """
    impl.engine.collectives.require_all_ranks(what)
    for ranks in impl.engine.local_parts.model_groups:
        ranks.require_all_ranks(what)
