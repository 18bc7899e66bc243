"""Finds the references that keep an object alive: those of user code, or garbage that is not collected yet."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_OWN = __name__.partition(".")[0]


class _Probe:
    """An object that is garbage once it is dropped, since it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def collect_garbage() -> None:
    """Collects all present garbage. ``gc.collect()`` returns at once while another thread collects."""
    probe = weakref.ref(_Probe())
    gc.collect()
    while probe() is not None:
        time.sleep(0.001)
        gc.collect()


def is_used_elsewhere(optimizer: Optimizer) -> bool:
    """Whether user code refers to an optimizer that a DistributedOptimizer contains. Schedulers do not count."""
    return any(
        not isinstance(holder, LRScheduler) and type(holder).__module__.partition(".")[0] != _OWN
        for holder in _holders_of(optimizer)
    )


def _holders_of(wanted: object) -> Iterator[Any]:
    """Yields code objects of running user functions with the object in a variable, and objects that refer to it."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            is_own = frame.f_globals.get("__name__", "").partition(".")[0] == _OWN
            if not is_own and frame.f_locals is not frame.f_globals:
                for value in frame.f_locals.values():  # a comprehension would create a cell that refers to it
                    if value is wanted:
                        yield frame.f_code
            frame = frame.f_back
    for referrer in gc.get_referrers(wanted):
        if isinstance(referrer, dict):
            yield _owner_of(referrer)
        elif not isinstance(referrer, FrameType):
            yield referrer


def _owner_of(attributes: dict[Any, Any]) -> Any:
    """Returns the object whose ``__dict__`` this is, or the dictionary itself."""
    for owner in gc.get_referrers(attributes):
        if getattr(owner, "__dict__", None) is attributes:
            return owner
    return attributes
