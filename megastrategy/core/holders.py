"""Says what keeps an object alive, for errors whose way out is to drop it."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterator
from types import CellType, FrameType, ModuleType
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_MOST = 3
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


class Holder(NamedTuple):
    """Something that refers to an object. ``text`` names it for the user."""

    owner: Any
    text: str


def holders_of(wanted: object) -> list[Holder]:
    """Returns variables, attributes and containers of user code that refer to the object."""
    return [*_variables(wanted), *_referrers(wanted)]


def is_used_elsewhere(optimizer: Optimizer) -> bool:
    """Whether user code refers to an optimizer that is in one of ours. A scheduler does not count."""
    owners = (holder.owner for holder in holders_of(optimizer))
    return any(
        not isinstance(owner, LRScheduler) and type(owner).__module__.partition(".")[0] != _OWN for owner in owners
    )


def describe_holders(wanted: object) -> str:
    """Names the first of :func:`holders_of`."""
    texts = list(dict.fromkeys(holder.text for holder in holders_of(wanted)))
    return ", ".join(texts[:_MOST]) + (", ..." if len(texts) > _MOST else "") or "a reference that Python does not show"


def _variables(wanted: object) -> Iterator[Holder]:
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            is_own = frame.f_globals.get("__name__", "").partition(".")[0] == _OWN
            if not is_own and frame.f_locals is not frame.f_globals:
                for name, value in frame.f_locals.items():
                    if value is wanted:
                        yield Holder(code, f"the variable {name!r} of {code.co_name}()")
            frame = frame.f_back


def _referrers(wanted: object) -> Iterator[Holder]:
    for referrer in gc.get_referrers(wanted):
        if isinstance(referrer, dict):
            yield _entry(referrer, _name_in(referrer, wanted))
        elif isinstance(referrer, CellType):
            yield Holder(referrer, "a variable of a function that is in another")
        elif not isinstance(referrer, FrameType):
            yield _attribute(referrer, _name_in(getattr(referrer, "__dict__", {}), wanted))


def _name_in(container: dict[Any, Any], wanted: object) -> Any:
    # Not a comprehension in the caller, which would make a cell with the object in it, another holder.
    for name, value in container.items():
        if value is wanted:
            return name
    return None


def _attribute(owner: object, name: Any) -> Holder:
    kind = f"a {type(owner).__name__}"
    return Holder(owner, kind if name is None else f"the attribute {name!r} of {kind}")


def _entry(container: dict[Any, Any], name: Any) -> Holder:
    """The object whose attributes, or whose submodules, a dictionary is; or the dictionary."""
    for owner in gc.get_referrers(container):
        attributes = getattr(owner, "__dict__", None)
        if attributes is container and isinstance(owner, ModuleType):
            return Holder(owner, f"the variable {name!r} of the module {owner.__name__}")
        if attributes is container or (isinstance(attributes, dict) and attributes.get("_modules") is container):
            return _attribute(owner, name)
        if isinstance(owner, dict) and owner.get("_modules") is container:  # of an object that was just made
            return _entry(owner, name)
    return Holder(container, f"the entry {name!r} of a dict")
