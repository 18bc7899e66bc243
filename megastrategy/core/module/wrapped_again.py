"""Takes parameters over from wrappers that were made for them before.

[Note: a module that is wrapped again]
torch DDP lets a module be wrapped several times, and the wrapper that is called reduces. Here parameters and gradients
are in the buffers of one engine. So the last wrapper has them, and the one before is closed: of the same module, or of
another one that shares a layer with it, as models with one encoder that are trained one after the other. Those that are
trained in turns are refused where the first is called again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter

from .grad_hooks import reducers_of


def take_over(params: Iterable[Parameter]) -> None:
    """Closes the engines that have any of these parameters.

    Not collective, since each rank has garbage of its own: optimizers are given back when they are used next.
    """
    for param in params:
        for reducer in reducers_of(param):
            engine = reducer.backwards.engine()
            assert engine is not None, "it has the reducer"
            wrapper: Any = engine.wrapper()
            (engine if wrapper is None else wrapper).close(give_back="later")
