"""Finds what keeps an object alive: user code, or garbage that is not collected yet."""

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
    """Garbage once it is dropped, since it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def collect_garbage() -> None:
    """Collects what is garbage now. ``gc.collect()`` alone returns at once while another thread collects."""
    probe = weakref.ref(_Probe())
    gc.collect()
    while probe() is not None:
        time.sleep(0.001)
        gc.collect()


def is_used_elsewhere(optimizer: Optimizer) -> bool:
    """Whether user code refers to an optimizer that is in one of ours. A scheduler does not count."""
    return any(
        not isinstance(holder, LRScheduler) and type(holder).__module__.partition(".")[0] != _OWN
        for holder in _holders_of(optimizer)
    )


def _holders_of(wanted: object) -> Iterator[Any]:
    """The code of user functions that run and have it in a variable, and objects and containers that refer to it."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            is_own = frame.f_globals.get("__name__", "").partition(".")[0] == _OWN
            if not is_own and frame.f_locals is not frame.f_globals:
                for value in frame.f_locals.values():  # a comprehension would make a cell, which refers to it, too
                    if value is wanted:
                        yield frame.f_code
            frame = frame.f_back
    for referrer in gc.get_referrers(wanted):
        if isinstance(referrer, dict):
            yield _owner_of(referrer)
        elif not isinstance(referrer, FrameType):
            yield referrer


def _owner_of(attributes: dict[Any, Any]) -> Any:
    """The object whose attributes a dictionary is; or the dictionary."""
    for owner in gc.get_referrers(attributes):
        if getattr(owner, "__dict__", None) is attributes:
            return owner
    return attributes
