"""Optimizer parameters that are not in the wrapped model, for example those of a loss function or of a frozen model.

[Note: parameters that are not the model's]
Their gradients are not reduced. Parameters that the module names in ``_ddp_params_and_buffers_to_ignore`` are among
them, and cause no warning. Those that never get a gradient need nothing. The others are stepped on every rank, each
with its own gradient, as under torch DDP, where their values diverge over ranks too: one warning names them. Each
rank's ``state_dict`` has its own state of them, and a file rank 0's, as there. A gradient norm has to be one number on
all ranks, or shards of one parameter would be clipped differently: extra parameters enter it with the mean over the
ranks of their norms' powers, which is their norm where their gradients are the same on every rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import Collectives
from ..data_path import Engine, norms_over_owners, total_grad_norm
from ..module import is_wrapped


class ExtraParams:
    """The extra parameters of one optimizer; ``params``: the result of the last :meth:`find`."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._has_warned = engine.collectives.size == 1  # where a gradient is whole as it is
        self._places: list[tuple[int, int]] = []  # group, place in the group
        self._ignored: set[int] = set()  # by id: the module itself asks to leave them to each rank
        self.params: list[Tensor] = []

    def find(self) -> None:
        """Looks through the groups, which hold the model's Parameters.

        Raises:
            ValueError: if none of the parameters is the model's, or one is another wrapped model's, or listed twice.
        """
        groups = self._optimizer.param_groups
        known = {id(param) for param in self._engine.named_params().values()}
        self._ignored = self._engine.ignored_params()
        params = [((n, place), param) for n, group in enumerate(groups) for place, param in enumerate(group["params"])]
        found = [(place, param) for place, param in params if id(param) not in known]
        kind = type(self._optimizer).__name__
        if not self._engine.steps_params_themselves:
            _check_listed_once(groups, params, kind)
        # None is the model's: almost certainly the optimizer was built before the model was copied, moved or prepared.
        if found and len(found) == len(params) and not any(id(param) in self._ignored for _, param in found):
            raise ValueError(
                f"no parameter of this {kind} is one of the wrapped model's, so the model would not be trained (the "
                f"first is {_describe(groups, found[0][0])}). Pass model.parameters() of the model that was wrapped"
            )
        for place, param in found:
            # Its gradient is reduced, and perhaps scattered, by an engine that this optimizer's step does not know.
            if is_wrapped(param):
                raise ValueError(
                    f"{_describe(groups, place)} of this {kind} belongs to another wrapped model, and a "
                    "DistributedOptimizer has one. Give each model an optimizer of its own, or wrap one module that "
                    "contains them all (torch.nn.ModuleDict): everything stays sharded. Without shards, step the "
                    f"optimizer itself, with {self._engine.all_reduce_option} for every model"
                )
        self._places, self.params = [place for place, _ in found], [param for _, param in found]

    def grads(self) -> list[Tensor]:
        """Returns this rank's gradients of them."""
        return [param.grad for param in self.params if param.grad is not None]

    def stepped(self) -> list[list[Tensor]]:
        """Returns the extra parameters that have a gradient, by group."""
        return [[param for param in group if param.grad is not None] for group in self.by_group()]

    def by_group(self) -> list[list[Tensor]]:
        """Returns all extra parameters, by group."""
        params: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for (number, _), param in zip(self._places, self.params, strict=True):
            params[number].append(param)
        return params

    def names_by_id(self) -> dict[int, str]:
        """Returns names for a checkpoint directory, where state is kept by name."""
        found = zip(self._places, self.params, strict=True)
        return {id(param): f"not of the model: parameter {place} of group {group}" for (group, place), param in found}

    def zero(self, set_to_none: bool) -> None:
        """Drops or zeroes their gradients, as torch does."""
        for tensor in self.params:
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.detach_().zero_()

    def warn_once(self) -> None:
        """Warns on rank 0 about extra parameters with gradients, before the first step for which any has one."""
        # Not earlier: frozen parameters never get a gradient, and need no warning.
        if self._has_warned or not self.grads():
            return
        self._has_warned = True
        text = describe_unreduced(self._optimizer, self._ignored)
        if text is not None and self._engine.collectives.is_rank_zero:
            warnings.warn(text, stacklevel=2)


def join_norm(
    norm: Tensor, grads: Sequence[Tensor], norm_type: float, groups: Sequence[Collectives], device: torch.device
) -> Tensor:
    """Joins the norm of reduced gradients (a scalar, fp64) with that of ``grads``, which differ from rank to rank.

    Returns one number on all ranks of ``groups``. Collective over each.
    """
    own = total_grad_norm(grads, norm_type, None, device)
    for collectives in groups:
        own = norms_over_owners(own, norm_type, collectives)
        own = own if math.isinf(norm_type) else own / collectives.size ** (1.0 / norm_type)
    joined: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(own.dtype), own]), norm_type)
    return joined


def describe_unreduced(optimizer: torch.optim.Optimizer, ignored: Collection[int] = ()) -> str | None:
    """Returns a warning that names parameters with a gradient that are in no wrapped model; None if there are none.

    ``ignored``: ids of parameters to leave out. The groups hold the Parameters themselves.
    """
    groups = optimizer.param_groups
    places = [
        (number, place)
        for number, group in enumerate(groups)
        for place, param in enumerate(group["params"])
        if param.grad is not None and not is_wrapped(param) and id(param) not in ignored
    ]
    if not places:
        return None
    named = "; ".join(_describe(groups, place) for place in places[:5]) + ("; ..." if len(places) > 5 else "")
    return (
        f"{len(places)} parameter(s) of this {type(optimizer).__name__} belong to no wrapped model and get gradients, "
        f"which are not reduced: {named}. Each rank steps them with its own gradient, so their values differ from "
        "rank to rank, as under torch DDP. Make them part of the module before it is wrapped, or freeze them"
    )


def _check_listed_once(
    groups: list[dict[str, Any]], params: Sequence[tuple[tuple[int, int], Tensor]], kind: str
) -> None:
    seen = set[int]()
    for place, param in params:
        if id(param) in seen:
            raise ValueError(
                f"{_describe(groups, place)} of this {kind} is in the groups twice, and torch would step it twice: "
                "list each parameter once"
            )
        seen.add(id(param))


def _describe(groups: list[dict[str, Any]], at: tuple[int, int]) -> str:
    number, place = at
    group = groups[number]
    names = group.get("param_names")  # if the optimizer was built on named_parameters()
    name = f" {names[place]!r}" if names else ""
    return f"parameter {place} of group {number}{name}, of shape {tuple(group['params'][place].shape)}"
