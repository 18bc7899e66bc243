"""Optimizers with methods beside ``step``, in the patterns of installed packages."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-Free SGD with Adam's denominator, in the pattern of the package ``schedulefree``.

    Parameters are ``y`` in training and the average ``x`` in evaluation; ``z`` is kept in the state, and the mode in
    the groups. It starts in evaluation, and refuses to step there.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        options = {"lr": lr, "beta": beta, "weight_decay": weight_decay, "k": 0, "weight_sum": 0.0, "train_mode": False}
        super().__init__(params, options)

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight=1 - 1 / group["beta"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight=1 - group["beta"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("the optimizer is not in train mode: call train()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, beta = group["lr"], group["beta"]
            group["k"] += 1
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if "z" not in state:
                    state["z"] = param.clone()
                    state["square"] = torch.zeros_like(param)
                state["square"].mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
                update = param.grad / (state["square"] / (1 - 0.9 ** group["k"])).sqrt().add_(1e-8)
                update.add_(param, alpha=group["weight_decay"])
                param.lerp_(state["z"], weight=share)
                param.add_(update, alpha=lr * (beta * (1 - share) - 1))
                state["z"].sub_(update, alpha=lr)
        return loss


class Methods(torch.optim.SGD):
    """Momentum SGD with a method of each kind."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.calls = 0
        self.listeners: list[Callable[[], object]] = []

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    # --- neither parameters nor state

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]

    def set_lr(self, lr: float) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = lr

    def subscribe(self, listener: Callable[[], object]) -> None:
        self.listeners.append(listener)

    @property
    def num_calls(self) -> int:
        return self.calls

    @num_calls.setter
    def num_calls(self, calls: int) -> None:
        self.calls = calls

    # --- parameters only, which are whole

    def num_elements(self) -> int:
        return sum(param.numel() for param in self._params())

    def with_lr(self, lr: float) -> Methods:
        self.set_lr(lr)
        return self

    # --- element by element

    def has_state(self) -> bool:
        return all("momentum_buffer" in self.state[param] for param in self._params())

    @torch.no_grad()
    def shrink(self, factor: float) -> None:
        torch._foreach_mul_(self._params(), factor)

    # --- what shards cannot do

    @torch.no_grad()
    def first_step(self, rho: float = 0.05) -> None:
        """Climbs as SAM's does."""
        norm = torch.stack([param.grad.norm() for param in self._params() if param.grad is not None]).norm()
        for param in (param for param in self._params() if param.grad is not None):
            self.state[param]["ascent"] = param.grad * (rho / (norm + 1e-12))
            param.add_(self.state[param]["ascent"])

    @torch.no_grad()
    def ascend(self) -> None:
        for param in self._params():
            if param.grad is not None:
                param.add_(param.grad, alpha=0.1)

    @torch.no_grad()
    def center_momentum(self) -> None:
        for param in self._params():
            momentum = self.state[param]["momentum_buffer"]
            momentum.sub_(momentum.mean())

    @property
    def largest_momentum(self) -> float:
        return max(self.state[param]["momentum_buffer"].abs().max().item() for param in self._params())

    def step_twice(self) -> None:
        self.step()
        self.step()

    # --- what they could, but do later

    @contextlib.contextmanager
    def halved(self) -> Iterator[None]:
        """As those that swap averages in for an evaluation."""
        self.shrink(0.5)
        yield
        self.shrink(2.0)

    def reset(self) -> None:
        self.state = collections.defaultdict(dict)
