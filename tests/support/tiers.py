"""Chooses what ``make test`` runs of a test with many cases: enough that each value of each parameter is among them.

The other cases, which put the same values together otherwise, are marked ``long`` (``make nightly``). A row of values
that one ``parametrize`` gives together counts as one value. Where that is still too much, ``@pytest.mark.sample(n)``
says how many cases stay, and some values are then seen by ``make nightly`` alone. What is asked for by its name is
always run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

Value = tuple[int, tuple[int, ...]]
"""A ``parametrize``, by its number, and the ids of the values that it gave."""


def values_of(item: pytest.Item) -> frozenset[Value]:
    """The values of a test's case; none for a test without parameters."""
    params = getattr(item, "callspec", None)
    if params is None:
        return frozenset()
    values = set()
    for number, mark in enumerate(item.iter_markers("parametrize")):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = names.split(",") if isinstance(names, str) else names
        # cases of one parametrize share its objects
        values.add((number, tuple(id(params.params[name.strip()]) for name in names)))
    return frozenset(values)


def sample(cases: Sequence[frozenset[Value]], most: int | None = None) -> list[int]:
    """The numbers of cases that have each value: the first that brings the most new ones, and so on. At most ``most``,
    at equal distances."""
    missing, rest, chosen = frozenset().union(*cases), dict(enumerate(cases)), list[int]()
    while missing:
        chosen.append(max(rest, key=lambda number: len(rest[number] & missing)))
        missing -= rest.pop(chosen[-1])
    chosen.sort()
    count = min(len(chosen), most or len(chosen))
    return [chosen[number * len(chosen) // count] for number in range(count)]


def mark_long(items: Iterable[pytest.Item], named: Sequence[str]) -> None:
    """Marks the cases that ``make test`` leaves out, except for those that the command line has by name."""
    for _, group in itertools.groupby(items, key=lambda item: (item.path, getattr(item, "originalname", None))):
        cases = [item for item in group if item.get_closest_marker("long") is None]
        if not (values := [values_of(item) for item in cases]) or not any(values):
            continue
        marker = cases[0].get_closest_marker("sample")
        stay = set(sample(values, *marker.args) if marker is not None else sample(values))
        for number, item in enumerate(cases):
            if number not in stay and not any(argument.endswith(item.name) for argument in named):
                item.add_marker(pytest.mark.long)


def cases_that_run(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """The values of these parameters in all cases of the file that run: for a fixture that trains them all at once."""
    cases = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(tuple(case[name] for name in names) for case in cases if set(names) <= set(case)))


def part(items: Sequence[pytest.Item], which: str) -> list[pytest.Item]:
    """``"2/5"``: of the files of these tests the second, the seventh and so on."""
    number, of = map(int, which.split("/"))
    files = list(dict.fromkeys(item.path for item in items))
    chosen = set(files[number - 1 :: of])
    return [item for item in items if item.path in chosen]
