"""Tests whether an optimizer needs the model's own Parameter objects, in whose place other tensors are stepped.

[Note: why an optimizer needs the Parameter objects]
Shards, whole parameters at their owners and main params are other tensors than the model's Parameters. A step that
looks one up by its ``id()`` or as a key, asks it for an attribute that user code has set, or for its class, finds
nothing, takes a default, and trains another way. Trials cannot show it, since their tensors are unknown to it too.
So it is looked for: in the optimizer's attributes and groups, and by a step of a tensor that records the attributes
that it is asked for.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from .isolation import Isolation
from .trial import copy_optimizer
from .values import NotForShardsError


def check_identity(optimizer: torch.optim.Optimizer) -> None:
    """Checks that other tensors can be stepped in place of the optimizer's parameters.

    Raises:
        NotForShardsError: if they cannot; see [Note: why an optimizer needs the Parameter objects].
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return  # its steps ask for nothing of the kind, whatever attributes the parameters have
    by_id = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    for name, value in _kept(optimizer):
        if any(_is_known(found, by_id) for found in _found_in(value)):
            raise NotForShardsError(
                f"{name} tells its parameters apart as objects (their id(), a key, or a module that has them), and "
                "other tensors are stepped in their place"
            )
    for group in optimizer.param_groups:
        # one that waits for its gather has another class meanwhile
        kinds = {getattr(type(param), "_plain", type(param)) for param in group["params"]} - {Tensor, Parameter}
        # Of a tensor-parallel parameter this rank's part is stepped, which is a plain tensor.
        kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.distributed.tensor")}
        if kinds:
            name = min(kind.__name__ for kind in kinds)
            raise NotForShardsError(
                f"parameters of class {name} are among its own, and plain tensors are stepped in their place"
            )
        given = {name for param in group["params"] for name in vars(param)}
        # nearly never: only then is a step made to see what it asks for
        if given and (asked := sorted(given & _asked_for(optimizer, group))):
            raise NotForShardsError(
                f"its step() asks parameters for {asked[0]!r}, an attribute that some have, and other tensors are "
                "stepped in their place. Make it an option of a parameter group"
            )


def _kept(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for name, value in optimizer.__dict__.items():
        if name not in ("state", "param_groups", "defaults") and not isinstance(value, Module):
            yield f"its attribute {name!r}", value
    for number, group in enumerate(optimizer.param_groups):
        yield from ((f"entry {name!r} of group {number}", value) for name, value in group.items() if name != "params")


def _found_in(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yields values that may identify a parameter: keys, members of sets, integers and modules. Looks in containers and
    in one plain object around them. Not parameters in lists, which an optimizer may keep for its own ``zero_grad``."""
    if depth == 0:
        return
    if isinstance(value, Mapping):
        yield from value.keys()
        value = list(value.values())
    if isinstance(value, set | frozenset):
        yield from value
    elif isinstance(value, list | tuple | collections.deque):
        for item in value:
            if isinstance(item, int | Module):
                yield item
            else:
                yield from _found_in(item, depth - 1)
    elif depth == 4 and hasattr(value, "__dict__") and not callable(value):
        for inner in vars(value).values():
            yield from _found_in(inner, depth - 1)


def _is_known(found: Any, by_id: Mapping[int, Tensor]) -> bool:
    if isinstance(found, Module):
        return any(id(param) in by_id for param in found.parameters())
    return id(found) in by_id if isinstance(found, Tensor) else type(found) is int and found in by_id


def _asked_for(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """Returns the names of attributes that a step asks a tensor for and that tensors do not have."""
    names = set[str]()

    class Asked(Tensor):
        """Records the attributes that it is asked for and does not have."""

        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            names.add(name)
            raise AttributeError(name)

    like = group["params"][0]
    param = torch.ones(6, 10, device=like.device).as_subclass(Asked)
    param.grad = torch.ones(6, 10, device=like.device)
    # Whatever an unknown optimizer raises on such a tensor, the other trials have plain ones; names up to there count.
    with Isolation(optimizer, like.device).open(), contextlib.suppress(Exception):
        copied = copy_optimizer(optimizer, group)
        copied.param_groups[0]["params"] = [param]
        copied.step()
    return names
