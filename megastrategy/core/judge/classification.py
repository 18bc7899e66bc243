"""How the groups of an optimizer can be divided among ranks, found by the poison test instead of a list of names.

torch's own classes are remembered: their steps depend on nothing but the options of their groups, and a test runs the
poison test on each of them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from .copies import Copies, Place
from .identity import check_asked, check_identity
from .isolation import isolated
from .poison import PoisonTest, make_inputs
from .values import NotClassifiedError, kind, leaves, same

Sharding: TypeAlias = Literal["auto", "flat", "whole", "replicated"]
"""How the ranks step a group, as the user says it; "auto" leaves the answer to the poison test."""

Way: TypeAlias = Literal["flat", "whole", "replicated", "refused"]
_TESTED_WAYS: tuple[Way, ...] = ("flat", "whole", "refused")
"""By the number of reasons against the ways before it."""

SHARDING = "sharding"
"""The entry of a parameter group that says it."""

_REMEMBERED: Mapping[type[Optimizer], Mapping[str, str]] = {
    torch.optim.SGD: {"momentum_buffer": "momentum"},
    torch.optim.Adam: {"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    torch.optim.AdamW: {"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    torch.optim.NAdam: {"exp_avg": "", "exp_avg_sq": ""},
    torch.optim.RAdam: {"exp_avg": "", "exp_avg_sq": ""},
    torch.optim.Adagrad: {"sum": ""},
    torch.optim.Adadelta: {"square_avg": "", "acc_delta": ""},
    torch.optim.Adamax: {"exp_avg": "", "exp_inf": ""},
    torch.optim.RMSprop: {"square_avg": "", "momentum_buffer": "momentum", "grad_avg": "centered"},
    torch.optim.Rprop: {"prev": "", "step_size": ""},
    torch.optim.ASGD: {"ax": ""},
}
"""Classes whose steps are flat with all options: the names of their state, each with the option that needs it."""


@dataclasses.dataclass(frozen=True)
class GroupClass:
    """How one parameter group can be divided.

    Attributes:
        way: "flat": ranks step pieces, cut at any element; "whole": each parameter is stepped by its owner;
            "replicated": every rank steps all of them, which only the user can say; "refused": neither of the first
            two would be equal to a step of all parameters.
        reason: why it is not flat, or neither.
        element_names: the names of state with a number for each element; None if they are not known.
        changed_options: the names of options that its steps change.
        num_kept: how many numbers the state has for each element of a whole parameter, by its number of dimensions.
        is_tested: whether the poison test says so, and not the user or the table of remembered classes.
    """

    way: Way
    reason: str = ""
    element_names: frozenset[str] | None = frozenset()
    changed_options: frozenset[str] = frozenset()
    num_kept: Mapping[int, int] = dataclasses.field(default_factory=dict)
    is_tested: bool = False


def sharding_of(group: Mapping[str, Any], default: Sharding) -> Sharding:
    """Returns how the user wants a group to be divided: its own entry, or that of the optimizer.

    Raises:
        ValueError: for an unknown word.
    """
    sharding: Sharding = group.get(SHARDING, default)
    if sharding not in get_args(Sharding):
        raise ValueError(f"sharding must be one of {', '.join(map(repr, get_args(Sharding)))}, got {sharding!r}")
    return sharding


def classify(
    optimizer: Optimizer, device: torch.device, dtype: torch.dtype, sharding: Sharding = "auto"
) -> list[GroupClass]:
    """Returns how each group can be divided. The optimizer is left as it was.

    Args:
        device, dtype: of the tensors that it will step.
        sharding: for groups without an entry of that name. What is not "auto" is not tested.
    """
    shardings = {number: sharding_of(group, sharding) for number, group in enumerate(optimizer.param_groups)}
    classes: dict[int, GroupClass] = {}
    for number, group in enumerate(optimizer.param_groups):
        names = _remembered_names(optimizer, group)
        chosen = shardings[number]
        if chosen == "flat" or (chosen == "auto" and names is not None):
            classes[number] = GroupClass("flat", element_names=names)
        elif chosen != "auto":
            classes[number] = GroupClass(chosen, element_names=None)
    unknown = [number for number in shardings if number not in classes]
    if unknown:
        try:
            check_identity(optimizer)
            with isolated(device):
                classes |= _test(optimizer, unknown, device, dtype)
        except NotClassifiedError as error:
            classes |= {number: GroupClass("refused", str(error)) for number in unknown}
    return [classes[number] for number in sorted(classes)]


def _remembered_names(optimizer: Optimizer, group: Mapping[str, Any]) -> frozenset[str] | None:
    """Returns the names of the state of a class that needs no test; None for others."""
    names = _REMEMBERED.get(type(optimizer))
    # a step that replaces the class's is another one
    if names is None or not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
        return None
    return frozenset(name for name, option in names.items() if not option or group.get(option))


def _test(
    optimizer: Optimizer, numbers: Sequence[int], device: torch.device, dtype: torch.dtype
) -> dict[int, GroupClass]:
    kinds = {number: kind_of_options(optimizer.param_groups[number]) for number in numbers}
    first_of = {number: next(n for n in numbers if kinds[n] == kinds[number]) for number in numbers}
    inputs: dict[Place, Tensor] = {}
    for first in sorted(set(first_of.values())):
        alike = [number for number in numbers if first_of[number] == first]
        params = [param for number in alike for param in optimizer.param_groups[number]["params"]]
        inputs |= make_inputs(first, [tuple(param.shape) for param in params], device, dtype)
    copies = Copies(optimizer)
    test = PoisonTest(copies, inputs)
    check_asked(optimizer, copies, inputs)
    places = {group: place for place, group in enumerate(sorted(set(first_of.values())))}
    classes = {}
    for first, place in places.items():
        reasons = test.reasons[first]
        way = _TESTED_WAYS[min(len(reasons), 2)]
        before = optimizer.param_groups[first]
        after = test.base.optimizer.param_groups[place]
        names = [name for name in after if name not in ("params", "lr", SHARDING)]
        changed = [name for name in names if not same(leaves(before.get(name)), leaves(after[name]))]
        element_names, num_kept = _kept_by(test, first)
        classes[first] = GroupClass(
            way,
            "; nor can ranks step whole parameters each: ".join(dict.fromkeys(reasons[:2])),
            element_names if way == "flat" else frozenset(),
            frozenset(changed),
            num_kept if way == "whole" else {},
            is_tested=True,
        )
    return {number: classes[first] for number, first in first_of.items()}


def _kept_by(test: PoisonTest, group: int) -> tuple[frozenset[str], dict[int, int]]:
    """Returns the names of element-wise state, and their largest number by the number of a parameter's dimensions."""
    names = set[str]()
    num_kept: dict[int, int] = {}
    for place, param in test.base.params.items():
        if place[0] == group:
            state = test.base.state(place)
            shaped = [name for name, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape]
            num_kept[param.dim()] = max(num_kept.get(param.dim(), 0), len(shaped))
            names.update(shaped if param.dim() else ())
    return frozenset(names), num_kept


def kind_of_options(group: Mapping[str, Any]) -> Any:
    """Returns what the options of a group switch on: equal for groups that one test answers for."""
    left_out = ("params", "param_names", "lr", "initial_lr", SHARDING)
    return tuple((name, kind(value)) for name, value in group.items() if name not in left_out)
