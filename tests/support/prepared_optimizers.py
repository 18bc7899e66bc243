"""Optimizers that make their state when they are constructed, and count on it in their steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.optimizers import Simple


class Prepared(Simple):
    """Makes its state in the constructor, in its own dtypes, except a sum that is like the parameter.

    A parameter without state gets the same in its first step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for param in group["params"]:
                self._prepare(param, self.state[param])

    def _prepare(self, param: Tensor, state: dict[str, Any]) -> None:
        state["step"] = torch.zeros(())
        state["sum"] = torch.zeros_like(param)
        state["total"] = torch.zeros_like(param, dtype=torch.float64)
        state["mask"] = torch.ones_like(param, dtype=torch.bool)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            self._prepare(param, state)
        state["step"] += 1
        state["sum"].add_(grad * state["mask"])
        state["total"].add_(grad.abs())
        param.sub_((state["sum"] / (1 + state["total"])).to(param.dtype), alpha=group["lr"])


class CountsOnState(Prepared):
    """Raises KeyError for a tensor that was not there when it was constructed, as Adagrad does in torch 2.12."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] += 1
        state["sum"].add_(grad)
        state["total"].add_(grad.abs())
        param.sub_((state["sum"] / (1 + state["total"])).to(param.dtype), alpha=group["lr"])


class SumsItsState(CountsOnState):
    """Counts on its state, too, and moves each element by what all have."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["sum"].add_(grad)
        param.sub_(grad / (1 + state["sum"].square().mean()), alpha=group["lr"])
