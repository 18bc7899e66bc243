"""Strangers are an optimizer's parameters that the wrapped model has not: a loss's head beside it, a frozen guide.

[Note: strangers]
Their gradients are not reduced. What the module names in ``_ddp_params_and_buffers_to_ignore`` is among them, and gives
no warning. Those that never get one need nothing. The others are stepped whole on every rank, each with its own
gradient, as under torch DDP, where their values part from rank to rank too: one warning names them. Each rank's
``state_dict`` has its own state of them, and a file rank 0's, as there. A gradient norm has to be one number on all
ranks, or shards of one parameter would be clipped differently: strangers enter it with the mean over the ranks of their
norms' powers, which is their norm where their gradients are the same on every rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import Collectives
from ..engine import Engine
from ..module import is_wrapped
from ..sync import norms_over_owners, total_grad_norm


class Strangers:
    """The strangers of one optimizer; see [Note: strangers].

    Attributes:
        params: those that :meth:`find` found last.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._is_told = engine.collectives.size == 1  # where a gradient is whole as it is
        self._places: list[tuple[int, int]] = []  # group, place in the group
        self._ignored: set[int] = set()  # by id: the module itself asks to leave them to each rank
        self.params: list[Tensor] = []

    def find(self) -> None:
        """Looks through the groups, which hold the model's Parameters.

        Raises:
            ValueError: if none of the parameters is the model's, or one is another wrapped model's.
        """
        groups = self._optimizer.param_groups
        known = {id(param) for param in self._engine.named_params().values()}
        self._ignored = self._engine.ignored_params()
        places = [(number, place) for number, group in enumerate(groups) for place in range(len(group["params"]))]
        found = [(n, p) for n, p in places if id(groups[n]["params"][p]) not in known]
        kind = type(self._optimizer).__name__
        # All of them: almost certainly the optimizer was built before the model was copied, moved or prepared.
        if (
            found
            and len(found) == len(places)
            and not any(id(groups[n]["params"][p]) in self._ignored for n, p in found)
        ):
            raise ValueError(
                f"no parameter of this {kind} is one of the wrapped model's, so the model would not be trained (the "
                f"first is {_describe(groups, found[0])}). Pass model.parameters() of the model that was wrapped"
            )
        for place in found:
            # Its gradient is reduced, and perhaps scattered, by an engine that this optimizer's step does not know.
            if is_wrapped(groups[place[0]]["params"][place[1]]):
                raise ValueError(
                    f"{_describe(groups, place)} of this {kind} belongs to another wrapped model, and a "
                    "DistributedOptimizer has one. Give each model an optimizer of its own, or wrap one module that "
                    "contains them all (torch.nn.ModuleDict): everything stays sharded. Without shards, step the "
                    f"optimizer itself, with {self._engine.all_reduce_option} for every model"
                )
        self._places, self.params = found, [groups[n]["params"][p] for n, p in found]

    def grads(self) -> list[Tensor]:
        """This rank's gradients."""
        return [param.grad for param in self.params if param.grad is not None]

    def stepped(self) -> list[list[Tensor]]:
        """Those that have a gradient, by group."""
        stepped: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for (number, _), param in zip(self._places, self.params, strict=True):
            stepped[number] += [param] if param.grad is not None else []
        return stepped

    def names_by_id(self) -> dict[int, str]:
        """Names for a directory, where state is kept by name."""
        found = zip(self._places, self.params, strict=True)
        return {id(param): f"not of the model: parameter {place} of group {group}" for (group, place), param in found}

    def zero(self, set_to_none: bool) -> None:
        """Drops or zeroes their gradients, as torch does."""
        for tensor in self.params:
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.detach_().zero_()

    def join_norm(self, norm: Tensor, norm_type: float, groups: Sequence[Collectives]) -> Tensor:
        """The norm of the model's gradients and of the strangers' together, as :func:`join_norm`."""
        return join_norm(norm, self.grads(), norm_type, groups, self._engine.device)

    def warn_once(self) -> None:
        """Names those that have a gradient, on rank 0, before the first step for which any has."""
        # Before the first gradient nobody knows whether one will come: a frozen guide never gets any.
        if self._is_told or not self.grads():
            return
        self._is_told = True
        text = describe_unreduced(self._optimizer, self._ignored)
        if text is not None and self._engine.collectives.is_rank_zero:
            warnings.warn(text, stacklevel=2)


def join_norm(
    norm: Tensor, grads: Sequence[Tensor], norm_type: float, groups: Sequence[Collectives], device: torch.device
) -> Tensor:
    """The norm of reduced gradients (a scalar, fp64) and of ``grads``, each rank's own, together: one number on all
    ranks of the groups. Collective over each."""
    own = total_grad_norm(grads, norm_type, None, device).reshape(1)
    for collectives in groups:
        # One number on all ranks, though each has its own gradients; [Note: strangers] says which, and why.
        own = norms_over_owners(own, norm_type, collectives)
        own = own if math.isinf(norm_type) else own / collectives.size ** (1.0 / norm_type)
    joined: Tensor = torch.linalg.vector_norm(torch.cat([norm.reshape(1), own]), norm_type)
    return joined


def describe_unreduced(optimizer: torch.optim.Optimizer, ignored: Collection[int] = ()) -> str | None:
    """A warning that names an optimizer's parameters that have a gradient and no wrapped model, without those of these
    ids; None if there are none.

    Its groups hold the Parameters themselves.
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
        f"which nobody reduces: {named}. Each rank steps them with its own gradient, so their values part from rank to "
        "rank, as under torch DDP. Make them part of the module before it is wrapped, or freeze them"
    )


def _describe(groups: list[dict[str, Any]], at: tuple[int, int]) -> str:
    number, place = at
    group = groups[number]
    names = group.get("param_names")  # of an optimizer that was built on named_parameters()
    name = f" {names[place]!r}" if names else ""
    return f"parameter {place} of group {number}{name}, of shape {tuple(group['params'][place].shape)}"
