"""Makes every ``accelerate.Accelerator`` ours for a block of code: those of libraries, and of scripts that stay as they
are.

[Note: how an Accelerator becomes ours]
Libraries have the class by reference already, so the class stays, and its ``__init__`` is another one for the block: it
gives an object of exactly that class ours, a subclass, and initialises it as that. No ``__new__`` is put on the class:
Python would refuse arguments to the class when it was taken away again. Other subclasses are left as they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Iterator
from typing import Any

import accelerate

from .accelerator import Accelerator
from .plugin import MegatronDDPPlugin

_log = logging.getLogger("megastrategy")


@contextlib.contextmanager
def replace_accelerators(plugin: MegatronDDPPlugin | None = None) -> Iterator[None]:
    """Makes every ``accelerate.Accelerator(...)`` of this process ours while the block runs, however the name was
    imported; ``transformers.Trainer`` makes one, too. It also decorates a function.

    Processes that are forked in the block inherit it; others do not. Accelerators that were made stay ours after the
    block. Blocks may follow each other, and be nested: the inner one's options hold in it. A block holds for all
    threads.

    Args:
        plugin: the options of all Accelerators without options, those made by our name as well; by default, the
            defaults.
    """
    plugin = plugin or MegatronDDPPlugin()
    theirs = accelerate.Accelerator
    ours = Accelerator
    their_init = theirs.__init__
    our_init = ours.__init__
    warned: set[type] = set()
    is_on = True

    @functools.wraps(their_init)
    def init_as_ours(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_on and type(self) is theirs:
            self.__class__ = ours
            self.__init__(*args, **kwargs)
            return
        if is_on and not isinstance(self, ours) and type(self) not in warned:
            warned.add(type(self))
            _warn_of_subclass(type(self))
        their_init(self, *args, **kwargs)

    @functools.wraps(our_init)
    def init_with_options(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(our_init).bind(self, *args, **kwargs).arguments
        handlers = given.get("kwargs_handlers") or ()
        has_one = any(isinstance(item, MegatronDDPPlugin) for item in (given.get("megatron_ddp_plugin"), *handlers))
        if is_on and not has_one:
            kwargs["megatron_ddp_plugin"] = plugin
        our_init(self, *args, **kwargs)

    theirs.__init__ = init_as_ours
    ours.__init__ = init_with_options  # type: ignore[method-assign]
    try:
        yield
    finally:
        is_on = False
        # They may have been wrapped in the meantime, by another thread's block for example: then these stay inside, and
        # do nothing any more.
        if theirs.__init__ is init_as_ours:
            theirs.__init__ = their_init
        if ours.__init__ is init_with_options:
            ours.__init__ = our_init  # type: ignore[method-assign]


def _warn_of_subclass(cls: type) -> None:
    if os.environ.get("RANK", "0") == "0":
        _log.warning(
            "%s.%s is a subclass of accelerate.Accelerator and is not replaced: it trains with torch DDP. Derive it "
            "from megastrategy.accelerate.Accelerator",
            cls.__module__,
            cls.__qualname__,
        )
