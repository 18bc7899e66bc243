"""Finds out whether gloo's own threads have released the tensors that were passed to gloo."""

from __future__ import annotations

import time
import weakref

from torch import Tensor


class GlooReferences:
    """Weak references to the tensors that were passed to gloo. One thread passes them, any thread may wait.

    [Note: gloo releases tensors after completion]
    A thread of gloo's reports that a collective is complete, and only then releases its tensors. That takes the GIL,
    since a tensor that Python has seen keeps its Python object. If the caller has continued to the interpreter's end
    meanwhile, CPython (before 3.14) ends the thread that asks for the GIL by unwinding its stack, which C++ does not
    allow in a destructor: the process aborts ("terminate called without an active exception") after all its work.

    Only gloo refers to the view, so its weak reference is gone when gloo releases it. torch then frees the tensor
    without the GIL, and takes the GIL once more before the thread lets go of it. Nothing shows when it has, so the wait
    goes on for some milliseconds: without them 10 of 60 processes aborted on a busy machine, with them none of 80.
    Sends and receives do not need this: no thread of gloo's own knows their tensors.
    """

    _POLL_S = 0.001
    _FREE_S = 0.01

    def __init__(self) -> None:
        self._views: list[weakref.ref[Tensor]] = []

    def view_for_gloo(self, tensor: Tensor) -> Tensor:
        """Returns a view of the same memory, to be passed to gloo and not kept."""
        view = tensor.detach()
        self._views = [known for known in self._views if known() is not None]
        self._views.append(weakref.ref(view))
        return view

    def wait_until_released(self, timeout_s: float) -> bool:
        """Waits until gloo has released everything, and returns whether it has."""
        deadline = time.monotonic() + timeout_s
        while any(view() is not None for view in self._views):
            if time.monotonic() > deadline:
                return False
            time.sleep(self._POLL_S)  # releases the GIL for gloo's thread
        if self._views:
            time.sleep(self._FREE_S)
        return True
