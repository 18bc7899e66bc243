"""Tries a sharded optimizer again before it steps with options that it did not have when it was wrapped.

[Note: options set later]
A trial is valid for the options that it ran with. A ``weight_decay`` of zero lets LARS pass, which takes no norm then;
set by hand, by a schedule or by a loaded state, each rank would take the norms of its own shards, and nothing would
show it. A decay that becomes another number multiplies the term that was tried. A term that was not there can couple
elements: a number that was zero, infinite or of the other sign (a clip that was off), and a flag, a word or None in
place of another. So the optimizer is tried once more with that. Tensors are not looked into: that would wait for the
device in every step. Neither are attributes, and entries that a group did not have.

An entry that the optimizer's own steps change (Schedule-Free's ``k``) was not set; trials show which these are. They,
and all that was not set, have the values of the first trial in a later one: with the counters of a long training beside
state that is new, an optimizer may do anything, and a refusal would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from .elementwise import Findings
from .known_findings import KnownFindings
from .values import Copier

_OF_TRIALS = {"params", "lr", "initial_lr"}  # a trial has its own tensors, and a rate of its own where there is none


class LaterTrials:
    """Remembers the options that were tried; the same on all ranks if they set the same options."""

    def __init__(self, optimizer: torch.optim.Optimizer, findings: Findings, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._first: list[dict[str, Any]] = []  # by group, its options at its first trial
        self._seen: list[dict[str, Any]] = []  # by group, the options that may be set, as they were last found tried
        self._tried: set[Hashable] = set()
        self._whole_groups = set(findings.whole_groups)
        for group in optimizer.param_groups:
            self._begin(group, findings)

    def of_options(self, known: KnownFindings, dtype: torch.dtype) -> Findings | None:
        """Tries a step with the present groups and options; None if options of their kind were tried.

        ``known``: the results of earlier trials; ``dtype``: the finest that is stepped.
        """
        groups = self._optimizer.param_groups
        untried = [number for number, group in enumerate(groups) if not self._is_tried(number, group)]
        if not untried:
            return None
        again = object.__new__(type(self._optimizer))
        again.__dict__.update(self._optimizer.__dict__)
        again.param_groups = [
            {**self._first[number], **self._set_later(number, group), "params": group["params"]}
            if number < len(self._first)
            else group
            for number, group in enumerate(groups)
        ]
        findings = self._if_divided_alike(known.probe(again, self._device, dtype))
        if findings.reason is not None:
            return Findings(self._in_words(untried) + findings.reason)
        for number in untried:
            if number < len(self._first):
                self._tried.add((number, _kind(self._set_later(number, groups[number]))))
            else:
                self._begin(groups[number], findings)
        return findings

    def _if_divided_alike(self, findings: Findings) -> Findings:
        """Returns the findings, or a refusal if they need whole parameters that were divided into shards."""
        parted = sorted(number for number in findings.whole_groups - self._whole_groups if number < len(self._first))
        if parted:
            return Findings(
                f"parameter group {parted[0]} then needs whole parameters, which were divided into flat shards"
            )
        self._whole_groups |= findings.whole_groups
        return findings

    def _begin(self, group: Mapping[str, Any], findings: Findings) -> None:
        options = {name: value for name, value in group.items() if name != "params"}
        # A copy: what a step counts in place must begin there again.
        self._first.append(Copier().copy(options))
        settable = options.keys() - findings.changed_entries - _OF_TRIALS
        self._seen.append({name: value for name, value in options.items() if name in settable})
        self._tried.add((len(self._first) - 1, _kind({})))

    def _is_tried(self, number: int, group: Mapping[str, Any]) -> bool:
        if number >= len(self._first):
            return False
        seen = self._seen[number]
        # By identity, in every step: nearly always nothing was set.
        if all(group.get(name) is value for name, value in seen.items()):
            return True
        if (number, _kind(self._set_later(number, group))) not in self._tried:
            return False
        self._seen[number] = {name: group.get(name) for name in seen}
        return True

    def _set_later(self, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        first = self._first[number]
        return {
            name: group[name]
            for name in self._seen[number]
            if name in group and _may_add_a_term(first[name], group[name])
        }

    def _in_words(self, untried: list[int]) -> str:
        said = dict[str, None]()  # in order, and once: often all groups are set alike
        for number in untried:
            if number < len(self._first):
                for name, value in self._set_later(number, self._optimizer.param_groups[number]).items():
                    said[f"{name}={value!r}, which was {self._first[number][name]!r} when it was wrapped: "] = None
        return "with " + "and ".join(said) if said else ""


def _may_add_a_term(first: Any, now: Any) -> bool:
    """Whether an option may switch something on that the first trial did not see; see [Note: options set later]."""
    if isinstance(first, tuple | list) and isinstance(now, tuple | list):
        return len(first) != len(now) or any(map(_may_add_a_term, first, now))
    if any(isinstance(value, bool | str | None) for value in (first, now)):
        return type(first) is not type(now) or first != now
    is_number = isinstance(first, int | float) and isinstance(now, int | float)
    return is_number and now != 0 and _regime(first) != _regime(now)


def _regime(number: float) -> tuple[float, bool]:
    """Its sign, 0 for zero, and whether it is finite."""
    return (0.0 if number == 0 else math.copysign(1.0, number)), math.isfinite(number)


def _kind(value: Any) -> Hashable:
    """Equal for options that differ only in numbers of one sign."""
    if isinstance(value, Mapping):
        return frozenset((name, _kind(item)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, bool | str | None):
        return value
    return type(value), _regime(value) if isinstance(value, int | float) else None
