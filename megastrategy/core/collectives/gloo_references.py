"""Tells when gloo's own threads have let go of what they were given."""

from __future__ import annotations

import time
import weakref

from torch import Tensor


class GlooReferences:
    """Views of the tensors that gloo was given, until it has let go of them. For one thread to lend, any to wait.

    [Note: gloo lets go after it is done]
    A thread of gloo's says that a collective is complete, and only then lets go of its tensors. That takes the GIL,
    since a tensor that Python has seen keeps its Python object. If the caller has gone on to the interpreter's end
    meanwhile, CPython (before 3.14) ends the thread that asks for the GIL by unwinding its stack, which C++ does not
    allow in a destructor: the process aborts ("terminate called without an active exception") after all its work.

    A view is gloo's alone, so it is gone when gloo has let go, and has had the GIL for it. Sends and receives do not
    need this: they have no thread of gloo's own that knows tensors.
    """

    _POLL_S = 0.001

    def __init__(self) -> None:
        self._views: list[weakref.ref[Tensor]] = []

    def view_for_gloo(self, tensor: Tensor) -> Tensor:
        """A view of the same memory, to be passed to gloo and not kept."""
        view = tensor.detach()
        self._views = [known for known in self._views if known() is not None]
        self._views.append(weakref.ref(view))
        return view

    def wait_until_released(self, timeout_s: float) -> bool:
        """Returns when gloo has nothing any more, and whether that is so."""
        deadline = time.monotonic() + timeout_s
        while any(view() is not None for view in self._views):
            if time.monotonic() > deadline:
                return False
            time.sleep(self._POLL_S)  # without the GIL, which gloo's thread may wait for
        return True
