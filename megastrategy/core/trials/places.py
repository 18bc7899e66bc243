"""Values that an optimizer's copies share and its steps may change, and the ways to put them back."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

from .values import equal, methods_of_generator


class Place:
    """A value that a step may change in place. ``get`` returns a copy; ``put`` sets it."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.get = get
        self._put = put
        self._first = get()

    def restore(self) -> None:
        if not equal(self._first, self.get()):
            self._put(self._first)


def of_dict(values: dict[Any, Any]) -> Place:
    """The entries of a dictionary, and their order."""

    def put(before: dict[Any, Any]) -> None:
        dict.clear(values)
        dict.update(values, before)

    return Place(lambda: dict(dict.items(values)), put)


def of_slots(value: Any, names: list[str]) -> Place:
    """The attributes of an object that are in slots."""

    def get() -> dict[str, Any]:
        return {name: getattr(value, name) for name in names if hasattr(value, name)}

    def put(before: dict[str, Any]) -> None:
        for name in get().keys() - before.keys():
            delattr(value, name)
        for name, item in before.items():
            setattr(value, name, item)

    return Place(get, put)


def of_items(values: list[Any] | set[Any] | collections.deque[Any]) -> Place:
    """The items of a list, a set or a deque."""

    def put(before: list[Any]) -> None:
        values.clear()
        (values.update if isinstance(values, set) else values.extend)(before)

    return Place(lambda: list(values), put)


def of_generator(value: Any) -> Place | None:
    """A generator of random numbers: torch's, numpy's or Python's."""
    if (names := methods_of_generator(value)) is not None:
        return Place(getattr(value, names[0]), getattr(value, names[1]))
    if hasattr(type(value), "bit_generator"):
        bits = value.bit_generator
        return Place(lambda: copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state))
    return None
