"""Copies of the user's optimizer with small tensors, on which calls are tried, and the changes that a call makes there.

A copy shares nothing with the optimizer that a call may change: containers, tensors and plain objects are copied, it
has neither the hooks nor a wrapper of ``step``, and the user's functions and inner optimizers are not called.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from .trial import copy_attributes
from .values import Copier, NotForShardsError, describe_error, equal, same_bits

TRIAL_SHAPE = (6, 10)  # few elements, since a call is tried each time it is made; two dimensions, of unlike size
_CUTS = (0, 7, 33, 60)  # inside rows and between them


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
    """The contents of a copy: its tensors by group, and its state."""

    groups: list[list[Tensor]]
    state: dict[Any, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(self.groups))

    def copied(self, *, grads: bool = False) -> Contents:
        return self._mapped(lambda tensor: tensor.detach().clone(), grads=grads)

    def cut(self) -> list[Contents]:
        """Returns copies in flat pieces."""
        return [
            self._mapped(lambda tensor, span=slice(*span): tensor.detach().reshape(-1)[span].clone())  # type: ignore[misc]
            for span in itertools.pairwise(_CUTS)
        ]

    def _mapped(self, part_of: Callable[[Tensor], Tensor], *, grads: bool = False) -> Contents:
        groups = [[part_of(tensor) for tensor in tensors] for tensors in self.groups]
        # A state that refers to a parameter refers to its copy from here on.
        copied = {id(old): new for old, new in zip(self.tensors, itertools.chain(*groups), strict=True)}
        # The copies with and without gradients differ only in this: a different result depends on gradients.
        for old in self.tensors if grads else ():
            copied[id(old)].grad = None if old.grad is None else old.grad.clone()
        copier = Copier(copied, functools.partial(_replacement, []))
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
    """Copies of everything in an optimizer.

    Attributes:
        tensors: for each tensor in the groups its values, and its state that has its shape, by name.
        others: everything else, by its place.
    """

    tensors: list[dict[str, Tensor]]
    others: dict[str, Any]

    def is_like(self, other: Found) -> bool:
        """Whether the two are equal, except for the rounding of a tensor's last few elements by a kernel."""
        return equal([self.tensors, self.others], [other.tensors, other.others], _close)


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() or a.shape != b.shape or a.dtype != b.dtype:
        return same_bits(a, b)
    # A vector kernel may round a tensor's last elements otherwise; a coupling differs by more than a millionth.
    return torch.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)


class OptimizerCopy:
    """A copy of the optimizer in its present mode, with other tensors in its groups, on which one call is made.

    Attributes:
        touches: "params" and "state", if the call looked there.
        uses_other_params: whether it used a parameter that is not in the groups.
        error: the exception that it raised, in words.
        result: its result; a list for an iterator, and None for a context manager.
        after: the contents when it returned.
        num_operations: the number of torch's operations that it made.
        has_changed: whether anything is different.
        has_moved, has_changed_grads, has_new_memory: whether tensors have other values, gradients, or memory.
        has_other_groups: whether other tensors are in the groups.
    """

    def __init__(self, optimizer: Optimizer, contents: Contents) -> None:
        self.touches: set[str] = set()
        self.uses_other_params = False
        self.error: str | None = None
        self.result: Any = None
        self.num_operations = 0
        self._tensors = contents.tensors
        self._replacements: list[Tensor] = []  # for parameters that are not in the groups
        touches = self.touches  # the set that make() leaves behind, so that a look after the call is not recorded
        self._groups = [_Params(params, lambda _: touches.add("params")) for params in contents.groups]
        known: dict[int, Any] = {id(optimizer.state): _State(contents.state, self._touch_state)}
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            known[id(group["params"])] = params
        self._copier = Copier(known, functools.partial(_replacement, self._replacements))
        self.optimizer: Any = copy_attributes(optimizer, self._copier.copy, ("step",))

    def _touch_state(self, key: Any) -> None:
        self.touches.add("state")
        self.uses_other_params |= isinstance(key, Tensor) and all(key is not tensor for tensor in self._tensors)

    def make(self, call: Call) -> None:
        """Makes the call with copies of its arguments."""
        # By the same copier: an argument that is a list of the optimizer becomes the list of the copy.
        copied = Call(
            call.function, *self._copier.copy([_without_functions(given) for given in (call.args, call.kwargs)])
        )
        before = self._look()
        grads = [None if tensor.grad is None else tensor.grad.clone() for tensor in self._tensors]
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        replacements = [tensor.clone() for tensor in self._replacements]
        self.touches.clear()
        try:
            with _Counts() as operations:
                self.result = self._check_result(copied(self.optimizer))
        # Raised by a replacement below: it is the answer already.
        except NotForShardsError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever an unknown method raises, it is an answer
            self.error = describe_error(error)
        self.num_operations = operations.count
        self.touches = set(self.touches)  # as it is now
        self.uses_other_params |= not all(map(torch.equal, replacements, self._replacements))
        found = self._look()
        outcome = {"result": self.result, "args": copied.args, "kwargs": copied.kwargs}
        self.after = Found(found.tensors, found.others | outcome)
        self.has_changed = not found.is_like(before)
        self.has_other_groups = found.others["params"] != before.others["params"]
        # To the bit: a call that moves a weight by its last digit has moved it.
        self.has_moved = not all(map(_exact, _values(before), _values(found)))
        self.has_changed_grads = not all(map(_exact, grads, [tensor.grad for tensor in self._tensors]))
        self.has_new_memory = addresses != [tensor.data_ptr() for tensor in self._tensors]

    def _check_result(self, result: Any) -> Any:
        """Raises NotForShardsError for a result that may work with the optimizer when the call has ended."""
        if isinstance(result, Iterator | contextlib.AbstractContextManager) or _holds(result, self.optimizer):
            raise NotForShardsError(
                "it returns a context manager, a generator, or a function or object that holds the optimizer, and may "
                "use it later, when the groups hold whole parameters"
            )
        return result

    def did_the_same(self, other: OptimizerCopy) -> bool:
        """Whether the call had the same effect on another copy."""
        return self.num_operations == other.num_operations and self.after.is_like(other.after)

    def _look(self) -> Found:
        optimizer, copier = self.optimizer, Copier(replace=functools.partial(_replacement, []))
        groups = optimizer.param_groups
        # list.__len__ and dict.get below go past the overrides, so that nothing is recorded.
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


def _holds(result: Any, optimizer: Optimizer) -> bool:
    """Whether the result of a call is a function or an object, except the optimizer, that refers to the optimizer."""
    if isinstance(result, functools.partial):
        return any(_holds(part, optimizer) for part in (result.func, *result.args, *result.keywords.values()))
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


def _replacement(replacements: list[Tensor], value: Any) -> Any:
    """Replaces objects that a copy must not use: other optimizers, and parameters, by tensors in ``replacements``."""
    # Asked for an attribute, as below, it would raise.
    if value is _NO_OPTIMIZER:
        return value
    # A parameter of the model, in an attribute: its values are not used in the trial, and a change of it shows.
    if isinstance(value, Parameter):
        replacements.append(torch.zeros(TRIAL_SHAPE, dtype=value.dtype, device=value.device))
        return replacements[-1]
    # A bound method would run on the user's object, however deep the copy.
    is_bound = isinstance(getattr(value, "__self__", None), Optimizer)
    return _NO_OPTIMIZER if isinstance(value, Optimizer) or is_bound else value


class _NoOptimizer:
    """Replaces an optimizer inside of another one, and methods that are bound to one."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotForShardsError("it uses another optimizer, inside of this one")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotForShardsError("it calls a method by way of an attribute")


_NO_OPTIMIZER = _NoOptimizer()


def _without_functions(value: Any) -> Any:
    """Returns arguments in which functions are replaced: a trial must not call the user's."""
    if isinstance(value, list | tuple):
        return [_without_functions(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_functions(item) for key, item in value.items()}
    # A closure would run the user's forward, and move its random numbers; a class is a value like any other.
    return _refuse_to_be_called if callable(value) and not isinstance(value, type | Tensor) else value


def _refuse_to_be_called(*_: Any, **__: Any) -> NoReturn:
    raise NotForShardsError("it calls a function that it is given, which a trial cannot")


def _touching(kind: type, name: str, *, one_key: bool) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self._touch(args[0] if one_key else None)
        return getattr(kind, name)(self, *args)

    return method


class _Params(list[Any]):
    """A group's tensors, which call ``touch`` when they are looked at. torch's reads in C++ are not seen."""

    def __init__(self, params: Iterable[Tensor], touch: Callable[[Any], object] = lambda key: None) -> None:
        super().__init__(params)
        self._touch = touch


class _State(collections.defaultdict[Any, Any]):
    """An optimizer's state, which calls ``touch`` with the key that it is asked for, and with None for all keys."""

    def __init__(self, state: dict[Any, Any], touch: Callable[[Any], object]) -> None:
        super().__init__(dict, state)
        self._touch = touch


for _name in ("__iter__", "__getitem__", "__len__"):
    setattr(_Params, _name, _touching(list, _name, one_key=False))
for _name in ("__getitem__", "__setitem__", "__contains__", "get", "setdefault", "pop"):
    setattr(_State, _name, _touching(collections.defaultdict, _name, one_key=True))
for _name in ("__iter__", "keys", "values", "items", "clear"):
    setattr(_State, _name, _touching(collections.defaultdict, _name, one_key=False))


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
