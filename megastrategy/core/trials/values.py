"""Nested values that an optimizer keeps: copies of them, comparisons, and the tensors in them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

PLAIN_TYPES = (bool, int, float, str, type(None))
"""The types of values that an option is compared by."""


_LIBRARIES = {"torch", "numpy", "megastrategy", "lightning", "pytorch_lightning", "accelerate", "transformers"}


class NotForShardsError(Exception):
    """The optimizer, or a call of it, would be wrong on shards, or cannot be judged. The message is the reason."""


def describe_error(error: Exception) -> str:
    """Returns the kind and the message of an exception that user code raised."""
    return f"{type(error).__name__}: {error}".rstrip(".: ")


class Copier:
    """Copies the objects that a step or a call may change in place: tensors, containers and plain objects.

    An object that is reached twice has one copy. Parameters, modules, optimizers, classes and functions are not copied:
    that would copy the model, and a copied function would change what the user's does. Methods and partial functions
    get copies of the objects that they are bound to, and generators of random numbers are copied.
    """

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # the copies by id of the original
        self._originals: list[Any] = []  # referenced, since Python gives the id of a collected object to another one

    def copy(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, types.MethodType | functools.partial):
            return self.replace(value, self._copy_of_bound(value))
        if isinstance(value, Parameter | Module | Optimizer | type) or (callable(value) and _is_of_a_library(value)):
            return value
        if isinstance(value, Tensor):
            return self.replace(value, value.detach().clone())
        if isinstance(value, dict):
            copied = self.replace(value, copy.copy(value))  # of its class
            for key, item in value.items():
                copied[key] = self.copy(item)
            return copied
        # Not a subclass of tuple: the constructor of a named tuple expects fields.
        if isinstance(value, list | set | collections.deque) or type(value) is tuple:
            return self.replace(value, type(value)(map(self.copy, value)))
        return self._copy_of_object(value)

    def _copy_of_bound(self, value: types.MethodType | functools.partial[Any]) -> Any:
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__))
        return functools.partial(self.copy(value.func), *map(self.copy, value.args), **self.copy(value.keywords))

    def _copy_of_object(self, value: Any) -> Any:
        inner = getattr(value, "__dict__", None)
        if not isinstance(inner, dict) and type(value).__module__ != "numpy" and generator_state(value) is None:
            return value
        try:
            copied = copy.copy(value)
        except Exception:  # noqa: BLE001 - a group, a file or a lock cannot be copied, and is shared
            return value
        if copied is not value:
            self.replace(value, copied)
            if isinstance(inner, dict):
                vars(copied).update({name: self.copy(item) for name, item in inner.items()})
        return copied

    def replace(self, value: Any, copied: Any) -> Any:
        """Makes ``copied`` the copy of ``value``, and returns it."""
        self._known[id(value)] = copied
        self._originals.append(value)
        return copied


def _is_of_a_library(value: Any) -> bool:
    """Whether an object keeps nothing that a step of a user's optimizer changes: functions, and torch's objects."""
    root = type(value).__module__.partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names


def generator_state(value: Any) -> Any:
    """Returns the state of a generator of random numbers, torch's or Python's; None for other objects."""
    # Looks at the class: an object may have every name, or raise for those that it does not know.
    for get, put in (("getstate", "setstate"), ("get_state", "set_state")):
        if callable(getattr(type(value), get, None)) and callable(getattr(type(value), put, None)):
            return getattr(value, get)()
    return None


def leaves(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yields what nested containers and dataclasses contain, keys of dictionaries too.

    It does not enter other objects: one may lead to everything in a program.
    """
    seen = set() if seen is None else seen
    items: Iterable[Any]
    if isinstance(value, Mapping):
        items = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        yield value
        return
    if id(value) not in seen:  # a container may contain itself
        seen.add(id(value))
        for item in items:
            yield from leaves(item, seen)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested containers and dataclasses; see :func:`leaves`."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def with_arithmetic(tensor: Tensor) -> Tensor:
    """Returns the tensor in a dtype that torch computes in: it has no sums of 8-bit floats."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Returns how far elements are apart: 0 for two NaNs and for equal infinities, as of a state that overflows."""
    a = with_arithmetic(a)
    b = with_arithmetic(b)
    return (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, shape and content; a NaN is equal to a NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and not bool(distances(a, b).any()))


def equal(a: Any, b: Any, same: Callable[[Tensor, Tensor], bool] = same_bits) -> bool:
    """Whether two nested values are equal; values that cannot be compared are not. ``same`` compares two tensors."""
    if a is b:
        return True
    # Tensors first: a comparison by == would be a tensor, whose truth is an error.
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if type(a) is type(b) and hasattr(a, "__tensor_flatten__"):  # a subclass, which may know no comparison
            one, other = ({name: getattr(value, name) for name in value.__tensor_flatten__()[0]} for value in (a, b))
            return equal(one, other, same)
        return isinstance(a, Tensor) and isinstance(b, Tensor) and same(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key], same) for key in a)
    if isinstance(a, list | tuple | collections.deque) and type(a) is type(b):
        return len(a) == len(b) and all(equal(one, other, same) for one, other in zip(a, b, strict=True))
    try:
        return _equal_objects(a, b, same)
    except (TypeError, ValueError, RuntimeError):
        return False


def _equal_objects(a: Any, b: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:
    if hasattr(a, "all") and type(a).__module__ == "numpy":
        return type(a) is type(b) and a.shape == b.shape and bool((a == b).all())
    if bool(a == b) or (a != a and b != b):  # NaN
        return True
    if type(a) is not type(b) or isinstance(a, types.FunctionType):
        return False
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and equal(a.__self__, b.__self__, same)
    if isinstance(a, functools.partial):
        return equal([a.func, a.args, a.keywords], [b.func, b.args, b.keywords], same)
    state = generator_state(a)
    if state is not None:
        return equal(state, generator_state(b), same)
    return hasattr(a, "__dict__") and equal(vars(a), vars(b), same)


def is_per_element(name: str, value: Any, shape: tuple[int, ...], names: Collection[str] | None) -> bool:
    """Whether a state value has a number for each element of a tensor of this shape.

    One element has the shape of a counter: there ``names``, those that the trials found, decide if they are known.
    """
    is_shaped = isinstance(value, Tensor) and value.shape == shape
    return is_shaped and (value.numel() > 1 or names is None or name in names)


def describe_undividable(name: str, value: Any, shape: tuple[int, ...]) -> str | None:
    """Describes state of a flat shard that a checkpoint cannot contain; None if it can."""
    if not isinstance(value, Tensor):
        # Nothing says which elements of a tensor in a container belong to which of the shard; numbers are of all.
        is_sequence = isinstance(value, list | tuple | set | collections.deque)
        items = value.values() if isinstance(value, dict) else value if is_sequence else ()
        if any(isinstance(item, Tensor) or describe_undividable(name, item, shape) is not None for item in items):
            return f"state {name!r}, tensors in a {type(value).__name__}, which cannot be divided among ranks"
        return None
    # A subclass may keep other elements than it shows: blocks with a scale, which a cut would separate.
    if type(value) not in (Tensor, Parameter):
        return f"state {name!r} as {type(value).__name__}, whose elements cannot be divided among ranks"
    if value.numel() > 1 and not is_per_element(name, value, shape, None):
        return (
            f"state {name!r} of shape {tuple(value.shape)}, which has neither one number nor one for each of the "
            f"{math.prod(shape)} elements of its shard"
        )
    return None
