"""Isolates trial steps: they leave no trace in the program, and send nothing.

[Note: traces of trial steps]
A copy of an optimizer has copies of its tensors, state and attributes, also of objects such as a schedule that counts
its calls. The generators of random numbers of the process are put back at the end. What a step changes in globals,
closures, classes, slots, files or iterators is not seen. A step that draws random numbers does so in each call, and not
for each tensor. So such an optimizer is called once a step.

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

import contextlib
import contextvars
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from .values import NotForShardsError, equal

_OF_COLLECTIVES = "c10d"
"""In the namespaces of torch.distributed's operators: its functions, and methods of process groups, come to them."""
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
    """Runs trial steps of one optimizer; see [Note: traces of trial steps]."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._device = device
        self._generators = _generators(device)
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self._mode = _Trial(param for group in optimizer.param_groups for param in group["params"])

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Steps are trial steps while this is open. Random numbers begin anew, the same on every rank."""
        before = self._random_states()
        try:
            self._seed()
            with _without_global_hooks(), contextlib.nullcontext() if self._is_torchs else self._mode:
                yield
        finally:
            for (_, put), state in zip(self._generators, before, strict=True):
                put(state)

    def draws(self, steps: Callable[[], Any]) -> bool:
        """Whether ``steps`` draw random numbers of the process."""
        before = self._random_states()
        steps()
        return not equal(before, self._random_states())

    def _random_states(self) -> list[Any]:
        return [get() for get, _ in self._generators]

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
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.seed(0)
        for device in {torch.device("cpu"), self._device}:
            seed(device)


def _generators(device: torch.device) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Returns the functions that get and set the state of each generator of random numbers of the process."""
    found: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
        (random.getstate, random.setstate),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append((numpy.get_state, numpy.set_state))
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        get = module.get_rng_state
        put = module.set_rng_state
        found.append((functools.partial(get, device), lambda state: put(state, device)))
    return found


def seed(device: torch.device) -> None:
    """Seeds the device's random numbers anew, the same on every rank."""
    if device.type in ("cpu", "meta"):
        torch.default_generator.manual_seed(0)
    else:
        # By its state: manual_seed() of a device's module is for the current device, which need not be this one.
        torch.get_device_module(device).set_rng_state(torch.Generator(device).manual_seed(0).get_state(), device)
