"""Trials of an optimizer's methods leave no trace on the optimizer, its parameters, or the generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megastrategy.core.trials import Call, NotForShardsError
from megastrategy.core.trials.method_trial import Effect, try_call
from tests.support.optimizers_with_methods import Methods, ScheduleFree

CPU = torch.device("cpu")


def params() -> list[Parameter]:
    return [Parameter(torch.ones(4, 4)), Parameter(torch.ones(3))]


def effect_of(optimizer: torch.optim.Optimizer, name: str, *args: Any) -> Effect:
    def method(optimizer: Any, *args: Any) -> Any:
        return getattr(optimizer, name)(*args)

    return try_call(optimizer, Call(method, args), CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "args", "effect"),
    [
        ("get_lr", (), Effect.NONE),
        ("set_lr", (0.3,), Effect.NONE),
        ("num_elements", (), Effect.NONE),
        ("forget", (), Effect.ELEMENTS),
        ("has_state", (), Effect.STATE),
        ("shrink", (0.5,), Effect.ELEMENTS),
    ],
)
def test_effects(name: str, args: tuple[Any, ...], effect: Effect) -> None:
    assert effect_of(Methods(params()), name, *args) is effect


@pytest.mark.parametrize("lr", [0.1, 0.0, torch.tensor(0.0)])
def test_modes_move_parameters_when_they_change_and_at_a_learning_rate_of_zero_too(lr: Any) -> None:
    optimizer = ScheduleFree(params(), lr=lr)
    assert effect_of(optimizer, "eval") is Effect.NONE, "it begins in evaluation"
    assert effect_of(optimizer, "train") is Effect.ELEMENTS
    optimizer.train()
    assert effect_of(optimizer, "train") is Effect.NONE
    assert effect_of(optimizer, "eval") is Effect.ELEMENTS


def test_one_group_in_another_mode_is_enough() -> None:
    optimizer = ScheduleFree([{"params": [param]} for param in params()])
    optimizer.train()
    optimizer.param_groups[1]["train_mode"] = False
    assert effect_of(optimizer, "train") is Effect.ELEMENTS


def test_a_trial_leaves_no_trace() -> None:
    class Noisy(Methods):
        def add_noise(self, notes: list[str]) -> None:
            self.calls += 1
            notes.append("called")
            for param in self._params():
                param.data.add_(torch.randn(1))

    tensors = params()
    optimizer = Noisy(tensors)
    for param in tensors:
        param.grad = torch.ones_like(param)
    hooked: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))  # type: ignore[arg-type]
    notes: list[str] = []
    generator = torch.get_rng_state()
    with pytest.raises(NotForShardsError, match="random numbers"):
        effect_of(optimizer, "add_noise", notes)
    assert (optimizer.calls, notes, hooked) == (0, [], [])
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(bool((param == 1).all()) and bool((param.grad == 1).all()) for param in tensors)  # type: ignore[union-attr]
