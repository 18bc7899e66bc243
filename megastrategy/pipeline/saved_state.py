"""Saves and loads the optimizer of a pipeline's stages as that of one process that has all layers.

A stage's optimizer has the parameters of its layers, numbered from zero. The whole one has, in each group, those of all
stages in the order of the layers, as a process would have put them there that goes through the model's parameters. A
parameter that several stages have is in it once, where the first of them has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import Collectives, GroupState, NamedOptimizer, gather_states, number_params
from ..errors import CheckpointError

_HOST = torch.device("cpu")
_TENSOR = "tensor"
_LABELS = "param_names"
"""torch's key in a group of an optimizer that was built on named_parameters()."""


class StageState(GroupState):
    """Joins the states of all stages' optimizers, and divides them again.

    Args:
        ranks: of the stages.
        name_in_model: returns the name of a parameter's first copy.
        layer_of: returns the number of the layer that a parameter of any stage belongs to.
    """

    def __init__(self, ranks: Collectives, name_in_model: Callable[[str], str], layer_of: Callable[[str], int]) -> None:
        self._ranks = ranks
        self._name_in_model = name_in_model
        self._layer_of = layer_of

    def join(self, optimizer: NamedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
        hosts = self._ranks.host
        groups = self.join_groups(optimizer, saved["param_groups"])
        numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
        names = optimizer.names_by_id()
        own_names = {number: names[key] for key, number in number_params(optimizer.inner).items()}
        by_name = {own_names[number]: contents for number, contents in saved["state"].items()}
        first_copies = {
            numbers[name]: contents for name, contents in by_name.items() if name == self._name_in_model(name)
        }
        state = dict(gather_states(first_copies, hosts, _HOST))
        if not hosts.is_rank_zero:
            return {**saved, "state": None}
        groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
        return {**saved, "state": {number: state[number] for number in sorted(state)}, "param_groups": groups}

    def join_groups(self, optimizer: NamedOptimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        options = [{key: value for key, value in group.items() if key not in ("params", _LABELS)} for group in groups]
        names = _names_by_group(optimizer)
        # By a parameter's name here, its name in an optimizer that was built on named_parameters().
        own_labels = {
            name: label
            for members, group in zip(names, groups, strict=True)
            for name, label in zip(members, group.get(_LABELS, ()), strict=False)
        }
        every: list[tuple[list[list[str]], list[dict[str, Any]], dict[str, str]]] = self._ranks.all_gather_objects(
            (names, options, own_labels)
        )
        _check_same_groups([theirs for _, theirs, _ in every])
        whole = self._join_names([theirs for theirs, _, _ in every])
        labels = {name: label for _, _, theirs in every for name, label in theirs.items()}
        named = [{_LABELS: [labels.get(name, name) for name in members]} if labels else {} for members in whole]
        joined = zip(options, named, whole, strict=True)
        return [{**group, **more, "params": members} for group, more, members in joined]

    def join_main_params(self, saved: dict[str, Tensor]) -> dict[str, Tensor] | None:
        own = {name: {_TENSOR: value} for name, value in saved.items() if name == self._name_in_model(name)}
        found = dict(gather_states(own, self._ranks.host, _HOST))
        if not self._ranks.is_rank_zero:
            return None
        return {name: found[name][_TENSOR] for name in sorted(found, key=self._layer_of)}

    def divide(self, optimizer: NamedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
        inner = optimizer.inner
        whole = self._join_names(self._ranks.all_gather_objects(_names_by_group(optimizer)))
        sizes = [len(group) for group in whole]
        theirs = [len(group["params"]) for group in saved["param_groups"]]
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
        numbers = number_params(inner)
        names = optimizer.names_by_id()
        params = [[numbers[id(param)] for param in group["params"]] for group in inner.param_groups]
        options = self.divide_groups(optimizer, saved["param_groups"])
        state = {}
        for param in (param for group in inner.param_groups for param in group["params"]):
            number = number_in_file[self._name_in_model(names[id(param)])]
            if number in saved["state"]:
                state[numbers[id(param)]] = saved["state"][number]
        groups = [{**group, "params": members} for group, members in zip(options, params, strict=True)]
        return {**saved, "state": state, "param_groups": groups}

    def divide_groups(self, optimizer: NamedOptimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        divided = []
        for stored, own in zip(groups, optimizer.inner.param_groups, strict=True):
            options = {key: value for key, value in stored.items() if key != _LABELS}
            divided.append({**options, _LABELS: own[_LABELS]} if _LABELS in own else options)
        return divided

    def divide_main_params(self, optimizer: NamedOptimizer, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        main_params = dict(saved)
        for name in optimizer.names_by_id().values():
            first_name = self._name_in_model(name)
            if first_name in saved:
                main_params[name] = saved[first_name]
        return main_params

    def _join_names(self, by_stage: list[list[list[str]]]) -> list[list[str]]:
        """Returns the names of all stages' parameters by group, in the order of the layers: only the first copy's."""
        if len({len(groups) for groups in by_stage}) > 1:
            raise CheckpointError(
                f"the stages' optimizers have {', '.join(str(len(groups)) for groups in by_stage)} groups: make the "
                "same groups on all stages, empty ones among them"
            )
        whole = []
        for members in zip(*by_stage, strict=True):
            of_stages = [[name for name in of_stage if name == self._name_in_model(name)] for of_stage in members]
            for names in of_stages:
                for one, other in itertools.pairwise(names):
                    if self._layer_of(one) > self._layer_of(other):
                        raise CheckpointError(
                            f"parameter {one!r} comes before {other!r} in a group of the optimizer, and a file numbers "
                            "the parameters of all stages in the order of the layers, so that states would land at "
                            "other parameters in one process. Give each group its parameters in the order of the "
                            "layers; those of another kind (biases, say) can be a group of their own"
                        )
            # A rank may have several stages, with stages of other ranks between them. The sort keeps equal ones in
            # order. A frozen parameter of the loss is on every stage, and counts once.
            whole.append(sorted(dict.fromkeys(itertools.chain(*of_stages)), key=self._layer_of))
        return whole


def _names_by_group(optimizer: NamedOptimizer) -> list[list[str]]:
    """Returns the names of this stage's parameters by group."""
    names = optimizer.names_by_id()
    return [[names[id(param)] for param in group["params"]] for group in optimizer.inner.param_groups]


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
