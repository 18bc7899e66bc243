"""Closes wrappers whose parameters are wrapped again.

[Note: a module that is wrapped again]
Under torch DDP a module may have several wrappers, and the one that is called reduces. Here parameters and gradients
are in the buffers of one engine. So the last wrapper has them, and an earlier wrapper is closed: that of the same
module, or of a module that shares a layer with it, such as models with one encoder that are trained one after the
other. If they are trained in turns, the next call of the first wrapper raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter

from .grad_hooks import owners_of


def close_other_engines(params: Iterable[Parameter]) -> None:
    """Closes the engines that have any of these parameters."""
    for param in params:
        for owner in owners_of(param):
            engine = owner.engine()
            assert engine is not None, "it has the owner"
            wrapper: Any = engine.wrapper()
            (engine if wrapper is None else wrapper).close()
