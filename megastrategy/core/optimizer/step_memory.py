"""Copies back what an optimizer's step left in memory that is not ours, and copies gradients that it keeps.

[Note: memory that an optimizer's step replaces]
Under torch DDP a parameter may get different memory (``p.data = ...``, as SAM does), and a gradient may be kept: the
next one is a different tensor. A shard is a view of the weights that are gathered, and its gradient is a view of a
buffer that the next backward overwrites. So values in other memory are copied back into ours, and a kept gradient is
replaced by a copy. Otherwise the model would silently not be trained, or be trained with another gradient. Trials
cannot find this, since no other code reads their tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


def bring_back(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Moves tensors back to the memory that they had before a step, with their present values.

    ``places``: for each tensor another one on that memory, made before the step.
    """
    for tensor, place in zip(tensors, places, strict=True):
        if tensor.data_ptr() != place.data_ptr():
            place.copy_(tensor.detach())
            tensor.data = place


def copy_kept_grads(state: Mapping[Any, Any], stepped: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Copies gradients, and views of them, that an optimizer keeps in its state, in lists and dictionaries too.

    ``stepped``: tensors and their gradients; each gradient is searched for in the tensor's own state.
    """
    for tensor, grad in stepped:
        if type(grad) is not Tensor or grad.layout != torch.strided:  # others may have no storage
            continue
        if kept := state.get(tensor):
            _copy_in(kept, grad.untyped_storage().data_ptr(), set())


def _copy_in(items: MutableMapping[Any, Any], storage: int, seen: set[int]) -> None:
    # Sets only existing names, so that a dictionary of any class may be changed while it is iterated over.
    for name, item in items.items():
        if (apart := _apart(item, storage, seen)) is not item:
            items[name] = apart


def _apart(value: Any, storage: int, seen: set[int]) -> Any:
    """Returns the value, or a copy if it is a tensor in this storage. Containers are changed in place."""
    if isinstance(value, Tensor):
        # Gradients are plain tensors; other kinds may have no storage.
        return value.clone() if type(value) is Tensor and value.untyped_storage().data_ptr() == storage else value
    if id(value) in seen:
        return value
    seen.add(id(value))  # a container may contain itself
    if isinstance(value, MutableMapping):
        _copy_in(value, storage, seen)
    elif isinstance(value, list | deque):
        for place, item in enumerate(value):
            if (apart := _apart(item, storage, seen)) is not item:
                value[place] = apart
    return value
