"""The closure among the arguments of an optimizer's ``step``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional arguments and keyword arguments of one call."""


def split_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Callable[[], Any] | None, Arguments]:
    """Returns the closure, None if there is none, and the other arguments. In front of them None keeps its place."""
    if "closure" in kwargs:
        return kwargs["closure"], (args, {name: value for name, value in kwargs.items() if name != "closure"})
    if args and callable(args[0]):  # anything else in front is an argument of the user's class
        return args[0], ((None, *args[1:]), kwargs)
    return None, (args, kwargs)


def with_closure(closure: Callable[[], Any], others: Arguments) -> Arguments:
    """Returns the arguments with a closure again."""
    args, kwargs = others
    return ((closure, *args[1:]), kwargs) if args and args[0] is None else (args, {**kwargs, "closure": closure})


def has_others(others: Arguments) -> bool:
    """Whether there are arguments beside the closure's place."""
    args, kwargs = others
    return bool(kwargs) or any(arg is not None for arg in args)
