"""Nested values that an optimizer keeps: what is in them, and whether two of them are equal to the bit."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_LIBRARIES = {"torch", "numpy", *sys.stdlib_module_names}
"""The objects of their classes are not entered: one may lead to everything in a program."""


class NotClassifiedError(Exception):
    """The optimizer cannot be stepped in parts, or no copy of it can be stepped. The message is the reason."""


class StoppedError(NotClassifiedError):
    """A step of a copy communicated, or reached the model."""


def members(value: Any, is_key: bool = False, seen: set[int] | None = None) -> Iterator[tuple[Any, bool]]:
    """Yields what is in nested containers, tensor subclasses and plain objects, and whether it is a key of a mapping or
    a member of a set. Another value yields itself."""
    seen = set() if seen is None else seen
    items = _items(value)
    if items is None:
        yield value, is_key
    elif id(value) not in seen:  # a container may contain itself
        seen.add(id(value))
        for item, item_is_key in items:
            yield from members(item, item_is_key, seen)


def _items(value: Any) -> list[tuple[Any, bool]] | None:
    """Returns what is directly in a value, and whether as a key; None if it is not entered."""
    if isinstance(value, _PLAIN) or type(value) in (Tensor, torch.nn.Parameter):
        return None
    if isinstance(value, Mapping):
        return [(key, True) for key in value] + [(item, False) for item in value.values()]
    if isinstance(value, set | frozenset):
        return [(item, True) for item in value]
    if isinstance(value, list | tuple | collections.deque):
        return [(item, False) for item in value]
    if isinstance(value, Tensor):
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else None
        return None if names is None else [(getattr(value, name), False) for name in names]
    is_of_a_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    if is_of_a_library or isinstance(value, type | Module | Optimizer):
        return None
    inner = getattr(value, "__dict__", None)
    return [(item, False) for item in inner.values()] if isinstance(inner, dict) else None


def leaves(value: Any, *, keys: bool = True) -> list[Any]:
    """Returns what :func:`members` yields. ``keys``: whether tensors that are keys are among it."""
    return [item for item, is_key in members(value) if keys or not (is_key and isinstance(item, Tensor))]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether all tensors and plain values are equal to the bit; NaNs are equal. Other objects have to be alike."""
    return len(one) == len(other) and all(map(_same_leaf, one, other))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensor(one, other)
    if type(one) is not type(other):
        return False
    return not isinstance(one, _PLAIN) or bool(one == other) or (one != one and other != other)


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_floating_point() and one.dtype.itemsize == 1:  # torch cannot compare these
        one = one.view(torch.uint8)
        other = other.view(torch.uint8)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def kind(value: Any) -> Any:
    """Returns what an option switches on or off: equal for numbers of one sign, and for equal flags and words.

    Numbers are compared by their sign and whether they are finite. Tensors are not read: that would wait for a device.
    """
    if isinstance(value, Mapping):
        return tuple((name, kind(item)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return (type(value), *map(kind, value))
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int | float):
        return (value > 0) - (value < 0), value - value == 0
    return value if isinstance(value, torch.dtype | torch.device) else type(value)


def describe_error(error: Exception) -> str:
    """Returns the kind and the message of an exception that user code raised."""
    return f"{type(error).__name__}: {error}".rstrip(".: ")
