"""Checks whether an optimizer needs the model's own Parameter objects, in whose place other tensors are stepped.

[Note: why an optimizer needs the Parameter objects]
Shards, whole parameters at their owners and main params are other tensors than the model's Parameters. A step that
looks one up by its ``id()`` or as a key, asks it for an attribute that user code has set, or for its class, finds
nothing, takes a default, and trains another way. Copies cannot show it, since their tensors are unknown to it too. So
it is looked for in the optimizer's attributes and groups, and by a step of tensors that record the attributes that they
are asked for.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from .copies import Copies, Inputs, attributes_of
from .isolation import isolated
from .values import NotClassifiedError, members


def check_identity(optimizer: Optimizer) -> None:
    """Checks that other tensors can be stepped in place of the optimizer's parameters, without a step.

    Raises:
        NotClassifiedError: if they cannot; see [Note: why an optimizer needs the Parameter objects].
    """
    check_kept(optimizer, [param for group in optimizer.param_groups for param in group["params"]])
    for group in optimizer.param_groups if not is_torchs(optimizer) else ():
        # one that waits for its gather has another class meanwhile
        kinds = {getattr(type(param), "_plain", type(param)) for param in group["params"]} - {Tensor, Parameter}
        # Of a tensor-parallel parameter this rank's part is stepped, which is a plain tensor.
        names = [kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.distributed.tensor")]
        if names:
            raise NotClassifiedError(
                f"parameters of class {min(names)} are among its own, and plain tensors are stepped in their place"
            )


def check_kept(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Raises NotClassifiedError if an attribute or option tells ``params`` apart, or has another optimizer in it.

    Parameters in a list are allowed, which an optimizer may keep for its own ``zero_grad``.
    """
    ids = {id(param) for param in params}
    for what, value in _kept(optimizer):
        for item, is_key in members(value):
            if isinstance(item, Optimizer):
                raise NotClassifiedError(
                    f"it steps another optimizer, in {what}, which does not see what is put into its groups. Use that "
                    f"{type(item).__name__} itself"
                )
            # a model in an attribute is used for more than that
            is_module = isinstance(item, Module) and item is not value
            has_param = is_module and any(id(param) in ids for param in item.parameters())
            if has_param or (type(item) is int and item in ids) or (is_key and id(item) in ids):
                raise NotClassifiedError(
                    f"{what} tells its parameters apart as objects (their id(), a key, or a module that has them), and "
                    "other tensors are stepped in their place"
                )


def _kept(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for name in attributes_of(optimizer):
        yield f"its attribute {name!r}", vars(optimizer)[name]
    for number, group in enumerate(optimizer.param_groups):
        yield from ((f"option {name!r} of group {number}", value) for name, value in group.items() if name != "params")


def check_asked(optimizer: Optimizer, copies: Copies, inputs: Inputs) -> None:
    """Raises NotClassifiedError if a step asks parameters for an attribute that some of the model's have."""
    present = {name for group in optimizer.param_groups for param in group["params"] for name in vars(param)}
    asked = set[str]()

    class Asked(Parameter):
        """Records the attributes that it is asked for and does not have."""

        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            raise AttributeError(name)

    if present and not is_torchs(optimizer):
        with contextlib.suppress(NotClassifiedError):  # names up to there count
            copies.run({place: values[:3] for place, values in inputs.items()}, Asked)
    if found := sorted(present & asked):
        raise NotClassifiedError(
            f"its step() asks parameters for {found[0]!r}, an attribute that some have, and other tensors are stepped "
            "in their place. Make it an option of a parameter group"
        )


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the class is torch's own: its steps ask for nothing of the kind, whatever attributes parameters have."""
    return type(optimizer).__module__.startswith("torch.optim.")


def check_main_param_steps(optimizer: Optimizer) -> None:
    """Checks that the optimizer can step fp32 main params in place of whole 16-bit weights.

    No step is made: whole parameters are stepped as under torch DDP, for the first time in the user's first step.

    Raises:
        NotClassifiedError: if it cannot.
    """
    try:
        # the class's: a scheduler's wrapper around the object's has the signature of an unbound function
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:
        raise NotClassifiedError(
            f"its step() cannot be called without arguments ({error}), and a closure would read the 16-bit weights"
        ) from None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = set(map(id, params))
    for name in attributes_of(optimizer):
        if any(id(item) in ids for item, _ in members(vars(optimizer)[name])):
            raise NotClassifiedError(
                f"its attribute {name!r} holds the 16-bit weights themselves, which it would step in their place"
            )
    check_identity(optimizer)
    with isolated(params[0].device):
        check_asked(optimizer, Copies(optimizer), {(0, 0): torch.ones(3, 6, 10, device=params[0].device)})
