"""Which values of an optimizer's state have an element for each of a tensor, and which can be divided with it."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.nn import Parameter


def is_per_element(name: str, value: Any, shape: tuple[int, ...], names: Collection[str] | None) -> bool:
    """Whether a state value has a number for each element of a tensor of this shape.

    One element has the shape of a counter: there ``names``, those of element-wise state, decide if they are known.
    """
    is_shaped = isinstance(value, Tensor) and value.shape == shape
    return is_shaped and (value.numel() > 1 or names is None or name in names)


def describe_undividable(name: str, value: Any, shape: tuple[int, ...]) -> str | None:
    """Describes state of a flat shard that a checkpoint cannot contain; None if it can."""
    if not isinstance(value, Tensor):
        # Nothing says which elements of a tensor in a container belong to which of the shard; numbers are of all.
        is_sequence = isinstance(value, list | tuple | set | collections.deque)
        items = value.values() if isinstance(value, dict) else value if is_sequence else ()
        if any(isinstance(item, Tensor) or describe_undividable(name, item, shape) is not None for item in items):
            return f"state {name!r}, tensors in a {type(value).__name__}, which cannot be divided among ranks"
        return None
    # A subclass may keep other elements than it shows: blocks with a scale, which a cut would separate.
    if type(value) not in (Tensor, Parameter):
        return f"state {name!r} as {type(value).__name__}, whose elements cannot be divided among ranks"
    if value.numel() > 1 and not is_per_element(name, value, shape, None):
        return (
            f"state {name!r} of shape {tuple(value.shape)}, which has neither one number nor one for each of the "
            f"{math.prod(shape)} elements of its shard"
        )
    return None
