"""Values that an optimizer's copies share and its steps may change, and the ways to put them back.

[Note: what steps print]
A step may print, log, or write to a file. Nothing brings a line back from a terminal. So where the code names ``print``
or a logger, the trial's thread prints and logs nothing, and the lines are counted. A file that can seek is cut off
where it was.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from .values import equal, methods_of_generator


class Place:
    """A value that a step may change in place. ``get`` returns a copy; ``put`` sets it, and is None if nothing can."""

    def __init__(self, where: str, get: Callable[[], Any], put: Callable[[Any], None] | None) -> None:
        self.where, self.get, self._put = where, get, put
        self._first = get()

    def restore(self) -> None:
        if self._put is not None and not equal(self._first, self.get()):
            self._put(self._first)

    def is_lost(self) -> bool:
        return self._put is None and not equal(self._first, self.get())


def of_dict(where: str, values: dict[Any, Any]) -> Place:
    """The entries of a dictionary, and their order."""

    def put(before: dict[Any, Any]) -> None:
        dict.clear(values)
        dict.update(values, before)

    return Place(where, lambda: dict(dict.items(values)), put)


def _of_entries(
    where: str,
    get: Callable[[], dict[str, Any]],
    put: Callable[[str, Any], object],
    remove: Callable[[str], object],
) -> Place:
    def put_all(before: dict[str, Any]) -> None:
        found = get()
        for name in found.keys() - before.keys():
            remove(name)
        for name, value in before.items():
            if name not in found or found[name] is not value:
                put(name, value)

    return Place(where, get, put_all)


def of_type(where: str, kind: type) -> Place:
    """The attributes of a class."""

    def get() -> dict[str, Any]:
        return {name: value for name, value in vars(kind).items() if not name.startswith("__")}

    return _of_entries(where, get, functools.partial(setattr, kind), functools.partial(delattr, kind))


def of_names(where: str, values: dict[str, Any], names: set[str]) -> Place:
    """Some entries of a namespace: global variables."""

    def get() -> dict[str, Any]:
        return {name: values[name] for name in names if name in values}

    return _of_entries(where, get, values.__setitem__, values.__delitem__)


def of_slots(where: str, value: Any, names: list[str]) -> Place:
    """The attributes of an object that are in slots."""

    def get() -> dict[str, Any]:
        return {name: getattr(value, name) for name in names if hasattr(value, name)}

    return _of_entries(where, get, functools.partial(setattr, value), functools.partial(delattr, value))


def of_items(where: str, values: list[Any] | set[Any] | collections.deque[Any]) -> Place:
    """The items of a list, a set or a deque."""

    def put(before: list[Any]) -> None:
        values.clear()
        (values.update if isinstance(values, set) else values.extend)(before)

    return Place(where, lambda: list(values), put)


def of_cell(where: str, cell: types.CellType) -> Place:
    """The variable of a closure."""
    return Place(where, lambda: cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))


def of_generator(where: str, value: Any) -> Place | None:
    """A generator of random numbers: torch's, numpy's or Python's."""
    if (names := methods_of_generator(value)) is not None:
        return Place(where, getattr(value, names[0]), getattr(value, names[1]))
    if hasattr(type(value), "bit_generator"):
        bits = value.bit_generator
        return Place(where, lambda: copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state))
    return None


def of_weak(where: str, values: Any) -> Place:
    """A mapping with weak keys or values; this has references to neither."""

    def get() -> dict[int, Any]:
        return {id(key): weakref.ref(value) if weak_values else value for key, value in values.items()}

    def put(before: dict[int, Any]) -> None:
        for key in list(values):
            if id(key) not in before:
                del values[key]
            elif not weak_values:
                values[key] = before[id(key)]

    weak_values = isinstance(values, weakref.WeakValueDictionary)
    return Place(where, get, put)


def of_file(where: str, file: Any) -> Place | None:
    """A file that has a place to return to; later output is cut off."""
    if file.closed or not file.seekable():
        return None

    def put(before: int) -> None:
        file.seek(before)
        if file.writable():
            file.truncate()

    return Place(where, file.tell, put)


class Muted(io.TextIOBase, logging.Filter):
    """Keeps one thread from printing and logging, and counts the attempts; see [Note: what steps print]."""

    def __init__(self, loggers: Sequence[logging.Logger]) -> None:
        io.TextIOBase.__init__(self)
        logging.Filter.__init__(self)
        self._loggers = loggers
        self._thread = 0
        self._stream: TextIO = sys.stdout
        self.count = 0

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return self._stream.write(text)
        self.count += 1
        return len(text)

    def filter(self, record: logging.LogRecord) -> bool:
        self.count += record.thread == self._thread
        return record.thread != self._thread

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        self._thread, self._stream = threading.get_ident(), sys.stdout
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(self))
            for logger in self._loggers:
                logger.addFilter(self)
                stack.callback(logger.removeFilter, self)
            # Another thread's redirection may put this one back after its end: it then hands everything on.
            stack.callback(setattr, self, "_thread", 0)
            yield
