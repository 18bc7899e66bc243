"""Doubles: copies of the user's optimizer with small tensors, on which calls are tried, and what a call left there.

A copy shares nothing with the optimizer that a call may change: containers and tensors are copied, its hooks and a
``step`` that somebody wrapped stay behind, and an optimizer or a function that is the user's is not called.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from .elementwise import equal, same_bits
from .trial import copy_of_attributes

TRIAL_SHAPE = (6, 10)  # few elements, since a call is tried each time it is made; two dimensions, of unlike size
_CUTS = (0, 7, 33, 60)  # inside rows and between them
_MOST_ITEMS = 1_000  # of what a generator makes, which may never end


class NotForShardsError(Exception):
    """The call would be wrong on shards, or cannot be judged; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of an optimizer, with the arguments that follow it."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, optimizer: Optimizer) -> Any:
        return self.function(optimizer, *self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a double: by group its tensors, and the optimizer's state."""

    groups: list[list[Tensor]]
    state: dict[Any, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(self.groups))

    def copied(self, *, grads: bool = False) -> Contents:
        return self._mapped(lambda tensor: tensor.detach().clone(), grads=grads)

    def cut(self) -> list[Contents]:
        """The same in flat pieces."""
        return [
            self._mapped(lambda tensor, span=slice(*span): tensor.detach().reshape(-1)[span].clone())  # type: ignore[misc]
            for span in itertools.pairwise(_CUTS)
        ]

    def _mapped(self, part_of: Callable[[Tensor], Tensor], *, grads: bool = False) -> Contents:
        groups = [[part_of(tensor) for tensor in tensors] for tensors in self.groups]
        # A state that refers to a parameter refers to its copy from here on.
        copied = {id(old): new for old, new in zip(self.tensors, itertools.chain(*groups), strict=True)}
        # Whole and bare doubles differ in this alone: what then differs in their result depends on gradients.
        for old in self.tensors if grads else ():
            copied[id(old)].grad = None if old.grad is None else old.grad.clone()
        copier = _Copier(copied)
        state = {
            copier.copy(key): {
                name: part_of(value) if _has_shape(value, TRIAL_SHAPE) else copier.copy(value)
                for name, value in values.items()
            }
            if isinstance(key, Tensor)
            else copier.copy(values)
            for key, values in self.state.items()
        }
        return Contents(groups, state)


@dataclasses.dataclass(frozen=True)
class Found:
    """Everything that an optimizer consists of at a moment, in copies.

    Attributes:
        tensors: of each tensor in the groups its values, and what the state has for each of its elements, by name.
        others: everything else, by where it was found.
    """

    tensors: list[dict[str, Tensor]]
    others: dict[str, Any]

    def is_like(self, other: Found) -> bool:
        """Whether the two are alike, but for how a kernel rounds a tensor's last few elements."""
        return equal([self.tensors, self.others], [other.tensors, other.others], _close)


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() or a.shape != b.shape or a.dtype != b.dtype:
        return same_bits(a, b)
    # A vector kernel may round a tensor's last elements otherwise; a coupling differs by more than a millionth.
    return torch.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)


class Double:
    """A copy of the optimizer as it is now, with other tensors in its groups.

    Its hooks and wrapped ``step`` stay behind, and an optimizer inside of it does.

    Attributes:
        touches: "params" and "state", if the call looked there.
        strangers: whether it used a parameter that is not in the groups.
        error: what it raised, in words.
        result: what it returned; of an iterator a list, and of a context manager None.
        is_for_later: whether it returned one of these.
        after: what was found when it returned.
        num_operations: how many of torch's it made.
        has_moved, has_changed: whether parameters are others than before; whether anything is.
        has_changed_grads, has_new_memory, has_other_groups: whether tensors have other gradients, other memory, and
            whether other tensors are in the groups.
    """

    def __init__(self, optimizer: Optimizer, contents: Contents) -> None:
        self.touches: set[str] = set()
        self.strangers = False
        self.error: str | None = None
        self.result: Any = None
        self.is_for_later = False
        self.num_operations = 0
        self._tensors = contents.tensors
        self._groups = [_Params(params, functools.partial(self.touches.add, "params")) for params in contents.groups]
        self._copier = copier = _Copier({id(optimizer.state): _State(contents.state, self._touch_state)})
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            copier.known[id(group["params"])] = params
        self.optimizer: Any = copy_of_attributes(optimizer, copier.copy, ("step",))

    def _touch_state(self, key: Any) -> None:
        self.touches.add("state")
        self.strangers |= isinstance(key, Tensor) and all(key is not tensor for tensor in self._tensors)

    def make(self, call: Call) -> None:
        """Makes the call with copies of its arguments."""
        # By the same copier: an argument that is the optimizer's own list is the double's own list.
        own = Call(call.function, *self._copier.copy([_without_functions(given) for given in (call.args, call.kwargs)]))
        before = self._look()
        grads = [None if tensor.grad is None else tensor.grad.clone() for tensor in self._tensors]
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        strays = [stray.clone() for stray in self._copier.strays]
        # What a call before this one touched is none of its own.
        self.touches.clear()
        try:
            with _Counts() as operations:
                self.result = self._worked_off(own(self.optimizer))
        # Raised by a stand-in below: it is the answer already.
        except NotForShardsError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever an unknown method raises, it is an answer
            self.error = in_words(error)
        self.num_operations = operations.count
        self.touches = set(self.touches)  # as it is now
        self.strangers |= not all(map(torch.equal, strays, self._copier.strays))
        found = self._look()
        self.after = Found(
            found.tensors, found.others | {"result": self.result, "args": own.args, "kwargs": own.kwargs}
        )
        self.has_changed = not found.is_like(before)
        self.has_other_groups = found.others["params"] != before.others["params"]
        # To the bit: a call that moves a weight by its last digit has moved it.
        self.has_moved = not all(map(_exact, _values(before), _values(found)))
        self.has_changed_grads = not all(map(_exact, grads, [tensor.grad for tensor in self._tensors]))
        self.has_new_memory = addresses != [tensor.data_ptr() for tensor in self._tensors]

    def _worked_off(self, result: Any) -> Any:
        """Does what a call left for later: walks an iterator, enters and leaves a context manager."""
        if isinstance(result, Iterator):
            self.is_for_later = True
            return list(itertools.islice(result, _MOST_ITEMS))
        if isinstance(result, contextlib.AbstractContextManager):
            self.is_for_later = True
            with result:
                return None
        return result

    def did_what(self, other: Double) -> bool:
        """Whether another double's call did the same."""
        return self.num_operations == other.num_operations and self.after.is_like(other.after)

    def _look(self) -> Found:
        optimizer, copier = self.optimizer, _Copier({})
        groups = optimizer.param_groups
        # list.__len__ and dict.get below go past the overrides, so that looking leaves no touch.
        places = {id(params): number for number, params in enumerate(self._groups)}
        others = {"params": [(places.get(id(group["params"])), list.__len__(group["params"])) for group in groups]}
        others |= {
            f"attribute {name}": copier.copy(value)
            for name, value in vars(optimizer).items()
            if name not in ("state", "param_groups")
        }
        for number, group in enumerate(groups):
            others |= {
                f"group {number}: {name}": copier.copy(value) for name, value in group.items() if name != "params"
            }
        tensors: list[dict[str, Tensor]] = []
        for number, tensor in enumerate(self._tensors):
            tensors.append({"": tensor.detach().clone()})
            for name, value in dict.get(optimizer.state, tensor, {}).items():
                if _has_shape(value, tensor.shape):
                    tensors[-1][name] = value.detach().clone()
                else:
                    others[f"state of tensor {number}: {name}"] = copier.copy(value)
        others |= {
            f"state: {key!r}": copier.copy(value)
            for key, value in dict.items(optimizer.state)
            if not isinstance(key, Tensor)
        }
        return Found(tensors, others)


def holds(result: Any, optimizer: Optimizer) -> bool:
    """Whether what a call returned is a function or an object, other than the optimizer, that has it at hand."""
    if isinstance(result, functools.partial):
        return any(holds(part, optimizer) for part in (result.func, *result.args, *result.keywords.values()))
    if isinstance(result, types.FunctionType):
        cells = [cell for cell in result.__closure__ or () if cell != types.CellType()]
        held: list[Any] = [cell.cell_contents for cell in cells]
    else:
        held = [getattr(result, "__self__", None), *getattr(result, "__dict__", {}).values()]
    return result is not optimizer and any(item is optimizer for item in held)


def _values(found: Found) -> list[Tensor]:
    return [values[""] for values in found.tensors]


def _exact(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


class _Copier:
    """Copies what a call may change in place: containers and tensors. Other objects are shared, but for optimizers: one
    inside of another would step what it has.

    Attributes:
        known: by ``id``, what stands for an object.
        strays: what stands for parameters that were not known.
    """

    def __init__(self, known: dict[int, Any]) -> None:
        self.known = known
        self.strays: list[Tensor] = []
        self._originals: list[Any] = []  # kept, as an id is given again

    def copy(self, value: Any) -> Any:
        if id(value) in self.known:
            return self.known[id(value)]
        copied = self._new(value)
        if copied is not value:
            self.known[id(value)] = copied
            self._originals.append(value)
        return copied

    def _new(self, value: Any) -> Any:
        # Asked for an attribute, as below, it would raise, though nobody has used it.
        if value is _NO_OPTIMIZER:
            return value
        # One of the model's, by way of an attribute: its values stay out of the trial, and a change of it shows.
        if isinstance(value, Parameter):
            self.strays.append(torch.zeros(TRIAL_SHAPE, dtype=value.dtype, device=value.device))
            return self.strays[-1]
        if isinstance(value, Tensor):
            return value.detach().clone()
        # A bound method would run on the user's object, however deep the copy.
        if isinstance(value, Optimizer) or isinstance(getattr(value, "__self__", None), Optimizer):
            return _NO_OPTIMIZER
        if isinstance(value, _Params):
            return list(map(self.copy, list.__iter__(value)))
        if isinstance(value, dict):
            shallow = copy.copy(value)  # of its class
            for key, item in value.items():
                shallow[key] = self.copy(item)
            return shallow
        if isinstance(value, list | set | collections.deque):
            return type(value)(map(self.copy, value))
        # No subclass: a named tuple's constructor takes fields, and is shared as it is.
        if type(value) is tuple:
            return tuple(map(self.copy, value))
        return value


class _NoOptimizer:
    """Stands for an optimizer inside of another, and for methods that are bound to one."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotForShardsError("it uses another optimizer, inside of this one")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotForShardsError("it calls a method by way of an attribute")


_NO_OPTIMIZER = _NoOptimizer()


def _without_functions(value: Any) -> Any:
    """Arguments in which functions are replaced: a trial must not call what is the user's."""
    if isinstance(value, list | tuple):
        return [_without_functions(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_functions(item) for key, item in value.items()}
    # A closure would run the user's forward, and move its random numbers; a class is a value like any other.
    return _refuse_to_be_called if callable(value) and not isinstance(value, type | Tensor) else value


def _refuse_to_be_called(*_: Any, **__: Any) -> NoReturn:
    raise NotForShardsError("it calls a function that it is given, which a trial cannot")


class _Params(list[Any]):
    """A group's tensors, which tell when they are looked at. What torch reads of a list in C++ is not told."""

    def __init__(self, params: Sequence[Tensor], touch: Callable[[], object]) -> None:
        super().__init__(params)
        self._touch = touch

    def __iter__(self) -> Iterator[Any]:
        self._touch()
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        self._touch()
        return super().__getitem__(place)

    def __len__(self) -> int:
        self._touch()
        return super().__len__()


class _State(collections.defaultdict[Any, Any]):
    """An optimizer's state, which tells of what key it was asked for; None: of all."""

    def __init__(self, state: dict[Any, Any], touch: Callable[[Any], object]) -> None:
        super().__init__(dict, state)
        self._touch = touch

    def __getitem__(self, key: Any) -> Any:
        self._touch(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._touch(key)
        super().__setitem__(key, value)

    def __contains__(self, key: Any) -> bool:
        self._touch(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._touch(None)
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._touch(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._touch(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._touch(key)
        return super().pop(key, *default)

    def keys(self) -> Any:
        self._touch(None)
        return super().keys()

    def values(self) -> Any:
        self._touch(None)
        return super().values()

    def items(self) -> Any:
        self._touch(None)
        return super().items()

    def clear(self) -> None:
        self._touch(None)
        super().clear()


class _Counts(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.shape == tuple(shape)


def in_words(error: Exception) -> str:
    """An exception's kind and message."""
    return f"{type(error).__name__}: {error}".rstrip(".")
