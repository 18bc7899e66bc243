"""Which reducer a parameter belongs to, by its hook."""

from __future__ import annotations

from typing import Any

from torch.nn import Parameter


def reducers_of(param: Parameter) -> list[Any]:
    """Returns the reducer, if it is alive and not closed, whose hook the parameter has: at most one."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    reducers = [getattr(hook, "megastrategy_reducer", lambda: None)() for hook in hooks]
    return [reducer for reducer in reducers if reducer is not None]


def is_wrapped(param: Parameter) -> bool:
    """Whether the parameter belongs to a wrapped model."""
    return bool(reducers_of(param))
