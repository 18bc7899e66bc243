"""Keeps the steps of copies from leaving a trace in the process, and from reaching the model.

[Note: traces of a classification]
While copies are stepped, the process's generators of random numbers are seeded, the same on every rank, and put back
at the end. This thread calls none of torch's global hooks, which count, log or prune for the user's own steps. Prints,
logging and warnings are off for the whole process meanwhile, and compiled functions run as they are written: an update
that its optimizer compiles would otherwise be compiled for each shape. What a step changes in globals, closures and
classes is not put back.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

_LOCK = threading.RLock()
"""What is changed while copies are stepped belongs to the process, so that one thread at a time may change it."""


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Steps of copies leave no trace while this is open; see [Note: traces of a classification]."""
    with _LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(_seeded(device))
        stack.enter_context(_without_global_hooks())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        if "torch._dynamo" in sys.modules:  # only then can a function be compiled; its import takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Seeds all generators of random numbers, and puts their states back at the end."""
    numpy = sys.modules.get("numpy.random")
    is_on_host = device.type in ("cpu", "meta")
    state = random.getstate()
    numpy_state = numpy.get_state() if numpy is not None else None
    with torch.random.fork_rng([] if is_on_host else [device], device_type="cuda" if is_on_host else device.type):
        try:
            random.seed(0)
            if numpy is not None:
                numpy.seed(0)
            torch.default_generator.manual_seed(0)
            if not is_on_host:
                # By its state: manual_seed() of a device's module is for the current device, which need not be this.
                seed = torch.Generator(device).manual_seed(0).get_state()
                torch.get_device_module(device).set_rng_state(seed, device)
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.set_state(numpy_state)


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Keeps torch's global hooks from being called by this thread. A step may call its base's, which calls them too."""
    thread = threading.get_ident()

    def skipped(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if threading.get_ident() == thread else hook(*args, **kwargs)

    registries: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    originals = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.update({number: skipped(hook) for number, hook in hooks.items()})
    try:
        yield
    finally:
        for hooks, before in zip(registries, originals, strict=True):
            hooks.update({number: hook for number, hook in before.items() if number in hooks})


class Guard(TorchDispatchMode):
    """Stops an operator that communicates, or that gets memory of the model's parameters, before it runs.

    Attributes:
        reason: why the first one was stopped, "" if none was. The step may have caught the error.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory = {_storage(param) for param in params} - {0}
        self.reason = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.split(".")[0].strip("_")
            self.stop(
                f"its step() communicates ({name} of torch.distributed), and ranks would exchange shards of different "
                "parameters"
            )
        for value in (*args, *kwargs.values()) if kwargs else args:
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, Tensor) and _storage(item) in self._memory:
                    self.stop(
                        "its step() uses the model's parameters by another way than its groups (a function, a closure "
                        "or an object that holds them), and other tensors are stepped in their place"
                    )
        return func(*args, **kwargs)

    def stop(self, reason: str) -> None:
        """Raises RuntimeError."""
        self.reason = self.reason or reason
        raise RuntimeError(reason)


def _storage(tensor: Tensor) -> int:
    """Returns the number of a tensor's memory; 0 if it has none."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return int(local.untyped_storage()._cdata) if local.layout is torch.strided else 0
