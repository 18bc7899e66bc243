"""Counts what was drawn: how many cases and actions, and which pairs of options met."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from typing import Any

from ..support.switches import MAY_CONTRADICT, product
from .cases import DTYPES, OPTIMIZERS, SWITCHES, Case, is_allowed
from .comparison import scripts

Pair = tuple[str, Any, str, Any]
FREE: dict[str, list[Any]] = {
    "weights": list(DTYPES),
    "autocast": [False, True],
    "scaled": [False, True],
    "buffer": [False, True],
    "late": [False, True],
    "optimizer": list(OPTIMIZERS),
}
"""Options whose every value goes with any value of any other."""


@functools.cache
def possible_pairs() -> frozenset[Pair]:
    """The pairs that the configuration does not refuse, with any other options."""
    contradicting = {name for name in MAY_CONTRADICT if name != "dtype"}
    rows = product({name: values for name, values in SWITCHES.items() if name in contradicting})
    found = {pair for row in rows if is_allowed(row) for pair in pairs(row)}
    others = {name: values for name, values in {**SWITCHES, **FREE}.items() if name not in contradicting}
    for (a, of_a), (b, of_b) in itertools.combinations({**SWITCHES, **FREE}.items(), 2):
        if a in others or b in others:
            found |= {(a, x, b, y) for x in of_a for y in of_b}
    return frozenset(found)


def pairs(values: dict[str, Any]) -> set[Pair]:
    """Lists each two of the values, in the order of the options."""
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(values, 2)}


@dataclasses.dataclass
class Tally:
    """Counts over many cases."""

    num_cases: int = 0
    num_scripts: int = 0
    actions: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    met: set[Pair] = dataclasses.field(default_factory=set)

    def count(self, case: Case) -> None:
        self.num_cases += 1
        self.num_scripts += len(scripts(case))
        self.actions.update(type(action).__name__ for action in case.program)
        if case.ranks > 1:  # on one rank most options say nothing
            values = {name: getattr(case.config, name) for name in SWITCHES}
            values["num_distributed_optimizer_instances"] = case.instances(case.ranks)
            kinds = {layer.dtype for layer in case.layers}
            weights = [name for name, dtypes in DTYPES.items() if set(dtypes) == kinds]
            values |= {"weights": weights[0] if weights else "mixed"}
            values |= {name: getattr(case, name) for name in FREE if name != "weights"}
            self.met |= pairs(values) & possible_pairs()

    def __str__(self) -> str:
        actions = ", ".join(f"{count} {name}" for name, count in self.actions.most_common())
        return (
            f"{self.num_cases} cases, {self.num_scripts} scripts; {len(self.met)} of {len(possible_pairs())} pairs of "
            f"values of two options met on two and more ranks; {self.actions.total()} actions: {actions}"
        )
