"""Versions of an optimizer's state, and the lock under which it changes; see hand_over's [Note: handing over]."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

STATE, MAIN_PARAMS = "state_dict()", "main_params()"


class Version(NamedTuple):
    """The version of an optimizer's state; the same on all ranks at the same place of a program."""

    num_begun: int
    """Steps that began to change it, and below those that were completed."""
    num_done: int
    num_replaced: int
    """Times that another state took its place."""
    num_moves: int
    """Times that it left a layout, or arrived in one."""
    num_params: int
    """Parameters in the layout."""

    @property
    def is_at_rest(self) -> bool:
        return self.num_begun == self.num_done


class AtRest:
    """Keeps the state of one optimizer at rest while another thread reads it.

    Attributes:
        lock: held by whoever changes the state, and by whoever reads it in another thread.
        num_replaced, num_moves: see :class:`Version`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.num_replaced = self.num_moves = 0

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Another state takes the place of this one."""
        with self.lock:
            self.num_replaced += 1
            yield
