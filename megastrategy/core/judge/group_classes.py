"""Keeps the classes of an optimizer's groups, and classifies again before a step with options of another kind.

[Note: options set later]
A test is valid for options of one kind: numbers of one sign, and the same flags and words. A ``weight_decay`` of zero
lets LARS pass, which takes no norm then; set by hand, by a schedule or by a loaded state, each rank would take the
norms of its own shards, and nothing would show it. So options are compared before each step, by identity first, and an
unknown kind is classified once. Options that the steps themselves change (Schedule-Free's ``k``) were not set: they
have the values of the first test in a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from .classification import GroupClass, Sharding, classify, kind_of_options
from .copies import Copies
from .values import NotClassifiedError, kind


class GroupClasses:
    """The classes of all groups of one optimizer; the same on all ranks if they have the same options.

    Args:
        device, dtype: of the tensors that it will step.
        sharding: for groups without an entry of that name.

    Raises:
        NotClassifiedError: if a group is refused.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, dtype: torch.dtype, sharding: Sharding) -> None:
        self._optimizer = optimizer
        self._device = device
        self._dtype = dtype
        self._sharding = sharding
        self._classes: list[GroupClass] = []
        self._first: list[dict[str, Any]] = []  # by group, its options when it was classified first
        self._seen: list[dict[str, Any]] = []  # by group, options that may be set, as they were at the last check
        self._known: set[Any] = set()  # the number of a group, and a kind that was classified
        self.update()

    @property
    def whole_groups(self) -> set[int]:
        """The numbers of groups whose parameters are stepped whole, each by its owner or by every rank."""
        return {number for number, one in enumerate(self._classes) if one.way in ("whole", "replicated")}

    @property
    def replicated_groups(self) -> set[int]:
        """The numbers of groups whose parameters every rank steps."""
        return {number for number, one in enumerate(self._classes) if one.way == "replicated"}

    @property
    def element_names(self) -> frozenset[str] | None:
        """The names of element-wise state of flat groups; None if they are not known."""
        names = frozenset[str]()
        for one in self._classes:
            if one.element_names is None:
                return None
            names |= one.element_names
        return names

    def num_kept(self, number: int, dim: int) -> int:
        """Returns how many numbers an element the state has, for a parameter of ``dim`` dimensions in a group."""
        one = self._classes[number]
        if one.way == "flat":
            return len(one.element_names or ())
        return one.num_kept.get(dim, max(one.num_kept.values(), default=0))

    def update(self) -> None:
        """Classifies groups and options of a kind that was not seen yet.

        Raises:
            NotClassifiedError: if the ranks cannot step a group with its present options as it is divided.
        """
        groups = self._optimizer.param_groups
        # By identity, in every step: nearly always nothing was set.
        new = [
            number
            for number, group in enumerate(groups)
            if number >= len(self._seen) or not all(group.get(name) is it for name, it in self._seen[number].items())
        ]
        new = [number for number in new if not self._is_known(number)]
        if not new:
            return
        optimizer = self._as_first_seen() if self._classes else self._optimizer
        classes = classify(optimizer, self._device, self._dtype, self._sharding)
        self._check(new, classes)
        for number in new:
            if number < len(self._first):
                self._known.add((number, kind(self._set_later(number))))
            else:
                self._begin(groups[number], classes[number])

    def _as_first_seen(self) -> Optimizer:
        """Returns the optimizer with options as when a group was first seen, but those that were set since."""
        again = object.__new__(type(self._optimizer))
        again.__dict__.update(self._optimizer.__dict__)
        again.param_groups = [
            {**self._first[number], **self._set_later(number), "params": group["params"]}
            if number < len(self._classes) and self._classes[number].is_tested
            else group
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        return again

    def _begin(self, group: Mapping[str, Any], found: GroupClass) -> None:
        number = len(self._classes)
        self._classes.append(found)
        # A copy: what a step counts in place must begin there again.
        self._first.append(Copies(self._optimizer).options_of(number) if found.is_tested else {})
        settable = {name for name, _ in kind_of_options(group)} - found.changed_options if found.is_tested else set()
        self._seen.append({name: group[name] for name in group if name in settable})
        self._known.add((number, kind(self._set_later(number))))

    def _set_later(self, number: int) -> dict[str, Any]:
        group = self._optimizer.param_groups[number]
        return {name: group[name] for name in self._seen[number] if name in group}

    def _is_known(self, number: int) -> bool:
        if number >= len(self._seen) or (number, kind(self._set_later(number))) not in self._known:
            return False
        self._seen[number] = {name: self._optimizer.param_groups[number].get(name) for name in self._seen[number]}
        return True

    def _check(self, new: list[int], classes: list[GroupClass]) -> None:
        for number, found in enumerate(classes):
            reason = found.reason if found.way == "refused" else ""
            if (
                not reason
                and number < len(self._classes)
                and (self._classes[number].way, found.way) == ("flat", "whole")
            ):
                reason = f"it then needs whole parameters, which are divided into flat shards ({found.reason})"
            if reason:
                raise NotClassifiedError(f"{self._changes(new)}parameter group {number}: {reason}")

    def _changes(self, new: list[int]) -> str:
        """Returns in words which options have another kind; "" for new groups."""
        said = dict[str, None]()  # in order, and once: often all groups are set alike
        for number in new:
            if number < len(self._first):
                first = self._first[number]
                for name, value in self._set_later(number).items():
                    if kind(value) != kind(first.get(name)):
                        said[f"{name}={value!r}, which was {first.get(name)!r} when it was wrapped"] = None
        return f"with {' and '.join(said)}: " if said else ""
