"""Isolates trial steps: they leave no trace in the program, and send nothing.

[Note: traces of trial steps]
A copy of an optimizer has its tensors, state and plain attributes. Everything else is the program's: random generators,
class attributes, globals, objects behind a function. A step may count in any of them (a schedule that falls after 60
calls), so they are put back before each trial, and at the end. Everything that the code of the optimizer's class can
reach is looked through for that: attributes, the class, its methods' closures, and globals by the names in their code.

What steps change outside of the copy is changed by a call, and not by a tensor. So such an optimizer is called once a
step. What cannot be put back, an iterator that was advanced, is a reason not to shard.

[Note: steps that communicate]
An optimizer that averages in its step (all-reduces weights, sends them to a neighbour) would average shards, which are
other elements on each rank, or wait for a rank that steps nothing. Trials would not show it: they are alike on all
ranks. So each call of torch.distributed raises in a trial before it sends anything. One that communicates in every
hundredth step does not do so in a trial: where the code names torch.distributed, and nothing is compiled, its steps of
shards are watched, too.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import io
import itertools
import logging
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from . import places
from .places import Muted, Place
from .values import NotForShardsError, equal, slots_of

_OF_COLLECTIVES = "c10d"
"""In the namespaces of torch.distributed's operators: its functions, and methods of process groups, come to them."""
_MOST_OBJECTS = 5_000
_MOST_ITEMS = 10_000
_MOST_NUMEL = 2**20
_FOREIGN = {"torch", "numpy", "megastrategy", "lightning", "pytorch_lightning", "accelerate", "transformers"}
"""Packages whose classes and functions keep nothing that a step of a user's optimizer counts in."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class CommunicationError(Exception):
    """A trial step called a collective, or sent or received."""


class _NoCommunication(TorchDispatchMode):
    """Raises for every operator that communicates.

    Attributes:
        called: the first one's name, "" if none was called. The step may have caught the error.
    """

    called = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _OF_COLLECTIVES in getattr(func, "namespace", ""):
            self.called = self.called or func.__name__.split(".")[0].strip("_")
            raise CommunicationError(f"it communicates ({self.called})")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_communication() -> Iterator[None]:
    """Prevents a step of shards from sending anything.

    Raises:
        CommunicationError: if it would, with the reason not to shard, also where the step has caught it.
    """
    mode = _NoCommunication()
    try:
        with mode:
            yield
    finally:
        if mode.called:
            raise CommunicationError(_communicates(mode.called))


def _communicates(called: str) -> str:
    return (
        f"its step() communicates ({called} of torch.distributed), and ranks would exchange shards of different "
        "parameters"
    )


class Isolation:
    """The former values of everything that an optimizer's steps can reach; see [Note: traces of trial steps].

    Attributes:
        may_communicate: whether its code names torch.distributed, so that steps of shards have to be watched.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._device = device
        self._generators = _generators(device)
        self._places: list[Place] = []
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self._mode = _NoCommunication()
        self._muted: Muted | None = None
        self.may_communicate = False
        if not self._is_torchs:  # whose steps change nothing but what a copy has
            walk = _Walk()
            self._places = list(walk.of_optimizer(optimizer))
            # Under a dispatch mode, which watches, functions that torch.compile has made would run uncompiled.
            self.may_communicate = walk.names_distributed and not walk.is_compiled
            if walk.prints or walk.loggers:
                self._muted = Muted(walk.loggers)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Steps are trial steps while this is open. Random numbers begin anew, the same on every rank."""
        try:
            self._seed()
            with contextlib.nullcontext() if self._muted is None else self._muted.open():
                with contextlib.nullcontext() if self._is_torchs else self._mode:
                    yield
        finally:
            self.restore()
            for generator in self._generators:
                generator.restore()

    def restore(self) -> None:
        """Restores all changes, except of random numbers, which continue to the end."""
        for place in self._places:
            place.restore()

    def counts_calls(self, steps: Callable[[], Any]) -> bool:
        """Whether ``steps`` change outside state, print, or draw random numbers: as often as they are called."""
        before = self._outside_state()
        steps()
        return not equal(before, self._outside_state())

    def _outside_state(self) -> list[Any]:
        context, num_prints = dict(contextvars.copy_context().items()), 0 if self._muted is None else self._muted.count
        return [context, num_prints, *(place.get() for place in (*self._generators, *self._places))]

    def check(self) -> None:
        """Raises NotForShardsError if the steps that were tried may not be steps of shards."""
        if self._mode.called:
            raise NotForShardsError(_communicates(self._mode.called))
        for place in self._places:
            if place.is_lost():
                raise NotForShardsError(f"trial steps advanced {place.where}, which cannot be put back")

    def _seed(self) -> None:
        random.seed(0)
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.seed(0)
        for device in {torch.device("cpu"), self._device}:
            seed(device)


def _generators(device: torch.device) -> list[Place]:
    """Returns the states of the process's generators of random numbers."""
    found: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
        (random.getstate, random.setstate),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found.append((numpy.get_state, numpy.set_state))
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        get, put = module.get_rng_state, module.set_rng_state
        found.append((functools.partial(get, device), lambda state: put(state, device)))
    return [Place("random numbers", get, put) for get, put in found]


def seed(device: torch.device) -> None:
    """Seeds the device's random numbers anew, the same on every rank."""
    if device.type in ("cpu", "meta"):
        torch.default_generator.manual_seed(0)
    else:
        # By its state: manual_seed() of a device's module is for the current device, which need not be this one.
        torch.get_device_module(device).set_rng_state(torch.Generator(device).manual_seed(0).get_state(), device)


# --- reachable places ------------------------------------------------------------------------------------------------


def _names_in(code: types.CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _is_foreign(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    return root in _FOREIGN or root in sys.stdlib_module_names


Reached = tuple[Place | None, list[Any]]
"""A place that a step can change, if a value is one, and the values that it refers to."""


def _of_tensor(where: str, tensor: Tensor) -> Reached:
    def put(before: Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(before)

    is_small = tensor.numel() <= _MOST_NUMEL
    return Place(where, lambda: tensor.detach().clone(), put) if is_small else None, []


def _of_class(where: str, kind: type) -> Reached:
    if _is_foreign(kind.__module__):
        return None, []
    return places.of_type(f"an attribute of {kind.__name__}", kind), list(vars(kind).values())


def _of_container(where: str, values: Any) -> Reached:
    if len(values) > _MOST_ITEMS:
        return None, []
    if isinstance(values, dict):
        return places.of_dict(where, values), list(dict.values(values))
    return places.of_items(where, values), list(values)


def _of_running_generator(where: str, generator: types.GeneratorType[Any, Any, Any]) -> Reached:
    def get() -> Any:
        frame = generator.gi_frame
        return None if frame is None else (frame.f_lasti, [repr(value)[:200] for value in frame.f_locals.values()])

    return Place(where, get, None), []


def _of_iterator(where: str, iterator: Any) -> Reached:
    # How far it has come: it says so where it is pickled.
    return Place(where, lambda: repr(iterator.__reduce__())[-200:], None), []


_BUILT_IN_ITERATORS: tuple[type, ...] = (
    itertools.count,
    itertools.cycle,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
)

_KINDS: tuple[tuple[Any, Callable[[str, Any], Reached]], ...] = (
    (types.ModuleType, lambda where, value: (None, [])),  # by the names that code has of it
    (logging.Logger, lambda where, value: (None, [])),  # it is muted
    (threading.local, lambda where, value: (places.of_dict(where, vars(value)), list(vars(value).values()))),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), lambda where, value: (places.of_weak(where, value), [])),
    (io.IOBase, lambda where, value: (places.of_file(where, value), [])),
    (queue.Queue, lambda where, value: (places.of_dict(where, vars(value)), [value.queue])),
    (Tensor, _of_tensor),
    (types.MethodType, lambda where, value: (None, [value.__self__, value.__func__])),
    (functools.partial, lambda where, value: (None, [value.func, *value.args, *value.keywords.values()])),
    ((staticmethod, classmethod), lambda where, value: (None, [value.__func__])),
    (property, lambda where, value: (None, [value.fget])),
    (type, _of_class),
    ((tuple, frozenset), lambda where, value: (None, list(value)[:_MOST_ITEMS])),
    ((dict, list, set, collections.deque), _of_container),
    (types.GeneratorType, _of_running_generator),
    (_BUILT_IN_ITERATORS, _of_iterator),
)


class _Walk:
    """Goes through what an optimizer's code can reach, each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # kept, as an id is given again
        self.names_distributed = self.is_compiled = self.prints = False
        self.loggers: list[logging.Logger] = []

    def of_optimizer(self, optimizer: Optimizer) -> Iterator[Place]:
        """The places that the steps of an optimizer's class can change, and a copy of it shares."""
        for group in optimizer.param_groups:
            yield places.of_dict("a parameter group", group)
        yield places.of_dict("its attributes", optimizer.__dict__)
        for name, value in optimizer.__dict__.items():
            if name not in ("state", "param_groups", "defaults", "step") and not name.endswith("_hooks"):
                yield from self.places(f"its attribute {name!r}", value)
        for kind in type(optimizer).__mro__:
            yield from self.places(kind.__name__, kind)

    def places(self, where: str, value: Any) -> Iterator[Place]:
        """The places in a value, and in the objects that it refers to."""
        if isinstance(value, (*_PLAIN, Parameter, Module, Optimizer)) or id(value) in self._seen:
            return
        if len(self._seen) >= _MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        if isinstance(value, logging.Logger):
            self.loggers.append(value)
        for place, inner in self._within(where, value):
            if place is not None:
                yield place
            for item in inner:
                yield from self.places(where, item)

    def _within(self, where: str, value: Any) -> Iterator[Reached]:
        for kinds, within in _KINDS:
            if isinstance(value, kinds):
                return iter([within(where, value)])
        if isinstance(value, types.FunctionType):
            return self._of_function(where, value)
        if (place := places.of_generator(where, value)) is not None:
            return iter([(place, [])])
        return self._of_object(where, value)

    def _of_function(self, where: str, function: types.FunctionType) -> Iterator[Reached]:
        if _is_foreign(function.__module__):
            return
        for cell in function.__closure__ or ():
            if cell != types.CellType():
                yield places.of_cell(f"a variable of {function.__qualname__}", cell), [cell.cell_contents]
        yield places.of_dict(f"an attribute of {function.__qualname__}", function.__dict__), []
        yield None, [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        names = _names_in(function.__code__)
        found = {name: function.__globals__[name] for name in names if name in function.__globals__}
        yield places.of_names(f"a global of {function.__module__}", function.__globals__, names), list(found.values())
        modules = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in found.values()}
        named = any(str(name).startswith("torch.distributed") for name in modules | names)
        self.names_distributed |= named or {"torch", "distributed"} <= names
        compiled = any(hasattr(value, "_torchdynamo_orig_callable") for value in found.values())
        self.is_compiled |= compiled or "compile" in names
        self.prints |= bool(names & {"print", "stdout"})
        for module in found.values():
            if not isinstance(module, types.ModuleType):
                continue
            values = [vars(module)[name] for name in names if name in vars(module)]
            if module is logging:
                values.append(logging.root)
            if _is_foreign(module.__name__):
                yield None, [value for value in values if isinstance(value, logging.Logger)]
            else:
                yield places.of_names(f"a global of {module.__name__}", vars(module), names), values

    def _of_object(self, where: str, value: Any) -> Iterator[Reached]:
        kind = type(value)
        in_module = kind.__module__
        if in_module == "numpy" and hasattr(value, "fill") and value.size <= _MOST_NUMEL:
            yield Place(where, value.copy, lambda before: value.__setitem__(..., before)), []
        if _is_foreign(in_module) and in_module not in ("types", "argparse") and "torch.optim" not in in_module:
            return
        if isinstance(values := getattr(value, "__dict__", None), dict):
            yield places.of_dict(where, values), list(values.values())
        if names := slots_of(value):
            found = [getattr(value, name) for name in names if hasattr(value, name)]
            yield places.of_slots(where, value, names), found
        if callable(call := vars(kind).get("__call__")):
            yield None, [call]
        yield None, [kind]
