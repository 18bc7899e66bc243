"""Takes parameters over from wrappers that were made for them before.

[Note: a module that is wrapped again]
torch DDP lets a module be wrapped several times, and the wrapper that is called reduces. Here parameters and gradients
are in the buffers of one engine. So the last wrapper of a module has it, and the one before is closed. Models that
share a layer are different: both may be called, and neither can have the layer. Then the second is refused, unless the
first wrapper was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter

from .grad_hooks import reducers_of
from .holders import collect_garbage, describe_holders


def take_over(params: Sequence[tuple[str, Parameter]], module: nn.Module) -> None:
    """Closes the engines that have any of these parameters of ``module``, by name, if their wrappers are gone or were
    made for it.

    Not collective, since each rank has garbage of its own: optimizers are given back when they are used next.

    Raises:
        ValueError: if a wrapper of another module has one, and user code has that wrapper.
    """
    if any(reducers_of(param) for _, param in params):
        collect_garbage()  # a wrapper that was dropped may be in a circle of references, as modules often are
    for name, param in params:
        for reducer in reducers_of(param):
            engine = reducer.backwards.engine()
            assert engine is not None, "it has the reducer"
            wrapper: Any = engine.wrapper()
            if wrapper is None:
                engine.close("later")
            elif engine.module is module:
                wrapper.close(give_back="later")
            else:
                raise ValueError(
                    f"parameter {name!r} is in another wrapped model too, a {type(engine.module).__name__}, and that "
                    f"wrapper is in use: {describe_holders(wrapper)}. One wrapper reduces a parameter: wrap one module "
                    "that contains both models (torch.nn.ModuleDict); or, if the other one is not trained any more, "
                    "call its close(), or drop it, before this one is wrapped"
                )
