"""Saves and loads the optimizer of a pipeline's stages as that of one process that has all layers.

A stage's optimizer has the parameters of its layers, numbered from zero. The whole one has, in each group, those of all
stages in the order of the layers, as a process would have put them there that goes through the model's parameters; a
parameter of which several stages have a copy is in it once, as the first of them has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import Collectives
from ..errors import CheckpointError
from ..module import LocalParts, StageParts
from ..optimizer import ShardSet
from ..shards import REMAINDER, gather_whole, number_params

_HOST = torch.device("cpu")
_TENSOR = "tensor"
_LABELS = "param_names"
"""torch's key in a group of an optimizer that was built on named_parameters()."""


def is_staged(impl: ShardSet) -> bool:
    """Whether other ranks have other layers of the model."""
    return impl.engine.local_parts.stage_ranks is not None


def whole_state(impl: ShardSet, saved: dict[str, Any]) -> dict[str, Any]:
    """``saved`` is the state of this stage's whole parameters; returned is that of all stages, on the first rank of
    all, and None in its place elsewhere. Collective over the stages.

    Raises:
        CheckpointError: on all ranks of the stages, if their optimizers have other groups.
    """
    parts, ranks = _stages(impl)
    hosts, groups = ranks.host, whole_groups(impl, saved["param_groups"])
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    own_names = _name_of_number(impl)
    own = {
        numbers[name]: kept
        for number, kept in saved["state"].items()
        if (name := own_names[number]) == parts.name_in_model(name)
    }
    state = dict(gather_whole(own, hosts, _HOST))
    if not hosts.is_rank_zero:
        return {**saved, "state": None}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    return {**saved, "state": {number: state[number] for number in sorted(state)}, "param_groups": groups}


def whole_groups(impl: ShardSet, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of all stages' optimizers, whose parameters are names; ``groups``: this one's, whose parameters may be
    anything. Collective over the stages.

    Raises:
        CheckpointError: on all of them, if they have other groups.
    """
    parts, ranks = _stages(impl)
    options = [{key: value for key, value in group.items() if key not in ("params", _LABELS)} for group in groups]
    names = _names_by_group(impl)
    # By a parameter's name here what it is called in an optimizer that was built on named_parameters().
    own_labels = {
        name: label
        for members, group in zip(names, groups, strict=True)
        for name, label in zip(members, group.get(_LABELS, ()), strict=False)
    }
    every: list[tuple[list[list[str]], list[dict[str, Any]], dict[str, str]]] = ranks.all_gather_objects(
        (names, options, own_labels)
    )
    _check_same_groups([theirs for _, theirs, _ in every])
    whole = _whole_names([theirs for theirs, _, _ in every], parts)
    labels = {name: label for _, _, theirs in every for name, label in theirs.items()}
    named = [{_LABELS: [labels.get(name, name) for name in members]} if labels else {} for members in whole]
    return [{**group, **more, "params": members} for group, more, members in zip(options, named, whole, strict=True)]


def is_on_any_stage(impl: ShardSet, is_here: bool) -> bool:
    """Whether some stage has main params: one that is frozen has none, and takes part. Collective over the stages."""
    _, ranks = _stages(impl)
    return ranks.host.max_of_bytes([is_here]) == [1]


def whole_main_params(impl: ShardSet, saved: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """As :func:`whole_state`, for main params by name."""
    parts, ranks = _stages(impl)
    own = {name: {_TENSOR: value} for name, value in saved.items() if name == _saved_in_whole(name, parts)}
    found = dict(gather_whole(own, ranks.host, _HOST))
    if not ranks.is_rank_zero:
        return None
    return {name: found[name][_TENSOR] for name in sorted(found, key=parts.layer_of)}


def state_of_stage(impl: ShardSet, saved: dict[str, Any]) -> dict[str, Any]:
    """This stage's part of the state of a whole model, whose numbers are its optimizer's own. Collective over the
    stages."""
    parts, ranks = _stages(impl)
    whole = _whole_names(ranks.all_gather_objects(_names_by_group(impl)), parts)
    sizes, theirs = [len(group) for group in whole], [len(group["params"]) for group in saved["param_groups"]]
    if sizes != theirs:
        raise CheckpointError(
            f"the state has groups of {theirs} parameters, and the optimizers of all stages have {sizes}: it is of "
            "another model, or its groups were made otherwise"
        )
    number_in_file = {
        name: number
        for members, group in zip(whole, saved["param_groups"], strict=True)
        for name, number in zip(members, group["params"], strict=True)
    }
    numbers = number_params(impl.inner)
    names = impl.names_by_id()
    state, groups = {}, []
    for own, stored in zip(impl.inner.param_groups, saved["param_groups"], strict=True):
        groups.append({**own_options(stored, own), "params": [numbers[id(param)] for param in own["params"]]})
        for param in own["params"]:
            number = number_in_file[parts.name_in_model(names[id(param)])]
            if number in saved["state"]:
                state[numbers[id(param)]] = saved["state"][number]
    return {**saved, "state": state, "param_groups": groups}


def own_options(stored: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a saved group, with the names of the optimizer's own parameters, which are some of its."""
    options = {key: value for key, value in stored.items() if key != _LABELS}
    return {**options, _LABELS: own[_LABELS]} if _LABELS in own else options


def main_params_of_stage(impl: ShardSet, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Main params by the names that this stage's parameters have."""
    (parts, _), found = _stages(impl), dict(saved)
    for name in impl.names_by_id().values():
        for own in (name, name + REMAINDER):
            if (first := _saved_in_whole(own, parts)) != own and first in saved:
                found[own] = saved[first]
    return found


def _stages(impl: ShardSet) -> tuple[StageParts, Collectives]:
    parts: LocalParts = impl.engine.local_parts
    assert isinstance(parts, StageParts)
    assert parts.stage_ranks is not None
    return parts, parts.stage_ranks


def _names_by_group(impl: ShardSet) -> list[list[str]]:
    """The names of this stage's parameters by group."""
    names = impl.names_by_id()
    return [[names[id(param)] for param in group["params"]] for group in impl.inner.param_groups]


def _name_of_number(impl: ShardSet) -> dict[int, str]:
    names = impl.names_by_id()
    return {number: names[key] for key, number in number_params(impl.inner).items()}


def _whole_names(by_stage: list[list[list[str]]], parts: StageParts) -> list[list[str]]:
    """The names of all stages' parameters by group, in the order of the layers: the first copy's alone."""
    if len({len(groups) for groups in by_stage}) > 1:
        raise CheckpointError(
            f"the stages' optimizers have {', '.join(str(len(groups)) for groups in by_stage)} groups: make the same "
            "groups on all stages, empty ones among them"
        )
    whole = []
    for members in zip(*by_stage, strict=True):
        of_stages = [[name for name in of_stage if name == parts.name_in_model(name)] for of_stage in members]
        for names in of_stages:
            for one, other in itertools.pairwise(names):
                if parts.layer_of(one) > parts.layer_of(other):
                    raise CheckpointError(
                        f"parameter {one!r} comes before {other!r} in a group of the optimizer, and a file numbers the "
                        "parameters of all stages in the order of the layers, so that states would land at other "
                        "parameters in one process. Give each group its parameters in the order of the layers; those "
                        "of another kind (biases, say) can be a group of their own"
                    )
        # A stage has several chunks of layers, perhaps, between which others' lie. The sort keeps equal ones in order.
        # A frozen parameter of the loss is every stage's, and counts once.
        whole.append(sorted(dict.fromkeys(itertools.chain(*of_stages)), key=parts.layer_of))
    return whole


def _saved_in_whole(name: str, parts: StageParts) -> str:
    """The name of a main param, with what says that it is a remainder."""
    plain = name.removesuffix(REMAINDER)
    return parts.name_in_model(plain) + name[len(plain) :]


def _check_same_groups(by_stage: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    for theirs in by_stage:
        for number, (one, other) in enumerate(zip(by_stage[0], theirs, strict=False)):
            differing = [key for key in {**one, **other} if repr(one.get(key)) != repr(other.get(key))]
            if differing:
                key = differing[0]
                raise CheckpointError(
                    f"group {number} of the optimizer has {key}={one.get(key)!r} on one rank of the stages and "
                    f"{other.get(key)!r} on another, and a file has one of them: set options on all stages alike"
                )
