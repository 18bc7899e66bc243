"""Keeps the classes of an optimizer's groups, and classifies again before a step with options of another kind.

[Note: options set later]
A test is valid for options of one kind: numbers of one sign, and the same flags and words. A ``weight_decay`` of zero
lets LARS pass, which takes no norm then; set by hand, by a schedule or by a loaded state, each rank would take the
norms of its own shards, and nothing would show it. So options are compared before each step, by identity first, and an
unknown kind is classified once. Options that the steps themselves change (Schedule-Free's ``k``) are not compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from .classification import GroupClass, Sharding, classify, kind_of_options
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
        later = [
            number
            for number, (group, seen) in enumerate(zip(groups, self._seen, strict=False))
            if not all(group.get(name) is value for name, value in seen.items())
        ]
        unknown = [number for number in later if (number, kind(self._set_later(number))) not in self._known]
        if unknown or len(groups) > len(self._seen):
            classes = classify(self._optimizer, self._device, self._dtype, self._sharding)
            self._check(unknown, classes)
            for number in range(len(self._seen), len(groups)):
                self._classes.append(classes[number])
                self._seen.append(self._settable(number))
                later.append(number)
        for number in later:
            self._seen[number] = self._set_later(number)
            self._known.add((number, kind(self._seen[number])))

    def _settable(self, number: int) -> dict[str, Any]:
        group = self._optimizer.param_groups[number]
        one = self._classes[number]
        names = {name for name, _ in kind_of_options(group)} - one.changed_options if one.is_tested else set()
        return {name: value for name, value in group.items() if name in names}

    def _set_later(self, number: int) -> dict[str, Any]:
        return {name: self._optimizer.param_groups[number].get(name) for name in self._seen[number]}

    def _check(self, unknown: list[int], classes: list[GroupClass]) -> None:
        """Raises NotClassifiedError if a group is refused, or cannot be stepped as it is divided."""
        for number, found in enumerate(classes):
            reason = found.reason if found.way == "refused" else ""
            if number < len(self._classes) and (self._classes[number].way, found.way) == ("flat", "whole"):
                reason = f"it then needs whole parameters, which are divided into flat shards ({found.reason})"
            if reason:
                raise NotClassifiedError(f"{self._changes(unknown)}parameter group {number}: {reason}")

    def _changes(self, unknown: list[int]) -> str:
        """Returns in words which options have another kind; "" if none has."""
        said = dict[str, None]()  # in order, and once: often all groups are set alike
        for number in unknown:
            for name, value in self._set_later(number).items():
                if kind(value) != kind(self._seen[number][name]):
                    said[f"{name}={value!r}, which was {self._seen[number][name]!r} before"] = None
        return f"with {' and '.join(said)}: " if said else ""
