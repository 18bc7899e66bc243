"""Isolates trial steps: they leave no trace in the program, and send nothing.

[Note: traces of trial steps]
A copy of an optimizer has its tensors, state and plain attributes. Other objects are the program's: random generators,
and objects in the optimizer's attributes, such as a schedule that counts its calls. They are put back before each
trial, and at the end. What a step changes in globals, closures, classes, files or iterators is not seen.

What steps change outside of the copy is changed by a call, and not by a tensor. So such an optimizer is called once a
step.

Global hooks of ``torch.optim`` are not called: they count, log or prune for the user's own steps. A step may call its
base's, which calls them again, so each hook gets a wrapper, once, that does nothing in a thread which is in a trial.

[Note: the model's weights in a trial]
A step may reach the model's parameters by a function or an object that it holds. On a copy that would move the model's
weights. So an operator that gets memory of the optimizer's parameters raises before it runs, and the optimizer is
refused: on shards such a step would use weights in whose place others are stepped.

[Note: steps that communicate]
An optimizer that averages in its step (all-reduces weights, sends them to a neighbour) would average shards, which are
other elements on each rank, or wait for a rank that steps nothing. Trials would not show it: they are alike on all
ranks. So each call of torch.distributed raises in a trial before it sends anything.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from . import places
from .places import Place
from .values import NotForShardsError, equal, slots_of

_OF_COLLECTIVES = "c10d"
"""In the namespaces of torch.distributed's operators: its functions, and methods of process groups, come to them."""
_MOST_OBJECTS = 5_000
_MOST_ITEMS = 10_000
_MOST_NUMEL = 2**20
_FOREIGN = {"torch", "numpy", "megastrategy", "lightning", "pytorch_lightning", "accelerate", "transformers"}
"""Packages whose classes and functions keep nothing that a step of a user's optimizer counts in."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_IN_TRIAL = contextvars.ContextVar("in_trial", default=False)
"""Whether this thread is in a trial."""
_SKIPS_TRIALS = "megastrategy_skips_trials"


class _CommunicationError(Exception):
    """A trial step called a collective, or sent or received."""


class _Trial(TorchDispatchMode):
    """Raises for operators that communicate, and for those on memory of the model's parameters; see [Note: the model's
    weights in a trial].

    Attributes:
        called: the first operator that would have communicated, "" if none. The step may have caught the error.
        has_met_model: whether there was such an operator. The step may have caught the error.
    """

    called = ""
    has_met_model = False

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages = {_storage(param) for param in params} - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, Tensor) and _storage(item) in self._storages:
                    self.has_met_model = True
                    raise NotForShardsError(_MEETS_MODEL)
        if _OF_COLLECTIVES in getattr(func, "namespace", ""):
            self.called = self.called or func.__name__.split(".")[0].strip("_")
            raise _CommunicationError(f"it communicates ({self.called})")
        return func(*args, **(kwargs or {}))


_MEETS_MODEL = (
    "its step() uses the model's parameters by another way than its groups (a function, a closure or an object that "
    "holds them), and other tensors are stepped in their place"
)


def _storage(tensor: Tensor) -> int:
    """Returns the number of a tensor's memory; 0 if it has none."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return int(local.untyped_storage()._cdata) if local.layout is torch.strided else 0


def _in_real_steps(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        return None if _IN_TRIAL.get() else hook(*args, **kwargs)

    setattr(call, _SKIPS_TRIALS, True)
    return call


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Keeps torch's global hooks from being called by this thread; see [Note: traces of trial steps]."""
    for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        for number, hook in list(hooks.items()):
            if not hasattr(hook, _SKIPS_TRIALS):
                hooks[number] = _in_real_steps(hook)
    token = _IN_TRIAL.set(True)
    try:
        yield
    finally:
        _IN_TRIAL.reset(token)


class Isolation:
    """The former values of everything that an optimizer's steps can reach; see [Note: traces of trial steps]."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._device = device
        self._generators = _generators(device)
        self._places: list[Place] = []
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self._mode = _Trial(param for group in optimizer.param_groups for param in group["params"])
        if not self._is_torchs:  # whose steps change nothing but what a copy has
            self._places = list(_Walk().of_optimizer(optimizer))

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Steps are trial steps while this is open. Random numbers begin anew, the same on every rank."""
        try:
            self._seed()
            with _without_global_hooks(), contextlib.nullcontext() if self._is_torchs else self._mode:
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
        """Whether ``steps`` change outside state, or draw random numbers: as often as they are called."""
        before = self._outside_state()
        steps()
        return not equal(before, self._outside_state())

    def _outside_state(self) -> list[Any]:
        return [place.get() for place in (*self._generators, *self._places)]

    def check(self) -> None:
        """Raises NotForShardsError if the steps that were tried may not be steps of shards."""
        if self._mode.called:
            raise NotForShardsError(
                f"its step() communicates ({self._mode.called} of torch.distributed), and ranks would exchange shards "
                "of different parameters"
            )
        if self._mode.has_met_model:
            raise NotForShardsError(_MEETS_MODEL)

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
    return [Place(get, put) for get, put in found]


def seed(device: torch.device) -> None:
    """Seeds the device's random numbers anew, the same on every rank."""
    if device.type in ("cpu", "meta"):
        torch.default_generator.manual_seed(0)
    else:
        # By its state: manual_seed() of a device's module is for the current device, which need not be this one.
        torch.get_device_module(device).set_rng_state(torch.Generator(device).manual_seed(0).get_state(), device)


# --- reachable places ------------------------------------------------------------------------------------------------


def _is_foreign(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    return root in _FOREIGN or root in sys.stdlib_module_names


Reached = tuple[Place | None, list[Any]]
"""A place that a step can change, if a value is one, and the values that it refers to."""


def _of_tensor(tensor: Tensor) -> Reached:
    def put(before: Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(before)

    is_small = tensor.numel() <= _MOST_NUMEL
    return Place(lambda: tensor.detach().clone(), put) if is_small else None, []


def _of_container(values: Any) -> Reached:
    if len(values) > _MOST_ITEMS:
        return None, []
    if isinstance(values, dict):
        return places.of_dict(values), list(dict.values(values))
    return places.of_items(values), list(values)


_KINDS: tuple[tuple[Any, Callable[[Any], Reached]], ...] = (
    ((types.ModuleType, types.FunctionType, type), lambda value: (None, [])),
    (Tensor, _of_tensor),
    (types.MethodType, lambda value: (None, [value.__self__])),
    (functools.partial, lambda value: (None, [value.func, *value.args, *value.keywords.values()])),
    ((tuple, frozenset), lambda value: (None, list(value)[:_MOST_ITEMS])),
    ((dict, list, set, collections.deque), _of_container),
)


class _Walk:
    """Goes through the objects in an optimizer's attributes, each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # kept, as an id is given again

    def of_optimizer(self, optimizer: Optimizer) -> Iterator[Place]:
        """The places that the steps of an optimizer can change, and a copy of it shares."""
        for group in optimizer.param_groups:
            yield places.of_dict(group)
        yield places.of_dict(optimizer.__dict__)
        for name, value in optimizer.__dict__.items():
            if name not in ("state", "param_groups", "defaults", "step") and not name.endswith("_hooks"):
                yield from self.places(value)

    def places(self, value: Any) -> Iterator[Place]:
        """The places in a value, and in the objects that it refers to."""
        if isinstance(value, (*_PLAIN, Parameter, Module, Optimizer)) or id(value) in self._seen:
            return
        if len(self._seen) >= _MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        for place, inner in self._within(value):
            if place is not None:
                yield place
            for item in inner:
                yield from self.places(item)

    def _within(self, value: Any) -> Iterator[Reached]:
        for kinds, within in _KINDS:
            if isinstance(value, kinds):
                return iter([within(value)])
        if (place := places.of_generator(value)) is not None:
            return iter([(place, [])])
        return self._of_object(value)

    def _of_object(self, value: Any) -> Iterator[Reached]:
        in_module = type(value).__module__
        if in_module == "numpy" and hasattr(value, "fill") and value.size <= _MOST_NUMEL:
            yield Place(value.copy, lambda before: value.__setitem__(..., before)), []
        if _is_foreign(in_module) and in_module not in ("types", "argparse") and "torch.optim" not in in_module:
            return
        if isinstance(values := getattr(value, "__dict__", None), dict):
            yield places.of_dict(values), list(values.values())
        if names := slots_of(value):
            yield places.of_slots(value, names), [getattr(value, name) for name in names if hasattr(value, name)]
