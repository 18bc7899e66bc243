"""The poison test leaves no trace: no hook is called, no number drawn, no byte printed, no tensor written."""

from __future__ import annotations

import functools
import logging
import random
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megastrategy.core.judge.classification import classify

CPU = torch.device("cpu")


class Ramp:
    """A schedule that is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1.0 if self.calls <= 200 else 0.1

    def next(self) -> float:
        return self()


class Calls(torch.optim.SGD):
    """Calls what it is given before each step."""

    def __init__(self, params: Any, call: Callable[[Any], Any], **attributes: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.call = call
        vars(self).update(attributes)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.call(self)
        return super().step(closure)


def make(call: Callable[[Any], Any], **attributes: Any) -> Calls:
    params = [nn.Parameter(torch.linspace(-1, 1, 20).view(4, 5)), nn.Parameter(torch.ones(5))]
    for param in params:
        param.grad = torch.ones_like(param)
    return Calls(params, call, **attributes)


def ways(optimizer: torch.optim.Optimizer) -> list[str]:
    return [one.way for one in classify(optimizer, CPU, torch.float32)]


def numpy_random() -> Any:
    return sys.modules["numpy"].random


def numpy_state() -> Any:
    return [list(value) if hasattr(value, "tolist") else value for value in numpy_random().get_state()]


TRACES: dict[str, tuple[Callable[[], Calls], Callable[[Calls], Any]]] = {
    "an object that is called": (lambda: make(lambda o: o.ramp(), ramp=Ramp()), lambda o: o.ramp.calls),
    "a bound method": (lambda: make(lambda o: o.ramp(), ramp=Ramp().next), lambda o: o.ramp.__self__.calls),
    "Python's random numbers": (lambda: make(lambda o: random.random()), lambda o: random.getstate()),
    "numpy's random numbers": (lambda: make(lambda o: numpy_random().rand()), lambda o: numpy_state()),
    "torch's random numbers": (lambda: make(lambda o: torch.rand(3)), lambda o: torch.get_rng_state().tolist()),
    "a generator of torch's": (
        lambda: make(lambda o: torch.rand(3, generator=o.generator), generator=torch.Generator()),
        lambda o: o.generator.get_state().tolist(),
    ),
    "a tensor behind a function": (
        lambda: make(functools.partial(lambda sums, o: sums.add_(1), torch.zeros(3))),
        lambda o: o.call.args[0].tolist(),
    ),
    "weights, gradients and state": (lambda: make(lambda o: None), lambda o: str([o.param_groups, dict(o.state)])),
}  # fmt: skip


@pytest.mark.parametrize(("make_one", "trace"), TRACES.values(), ids=TRACES)
def test_what_a_step_counts_and_draws_stays_as_it_was(make_one: Any, trace: Any) -> None:
    pytest.importorskip("numpy")
    optimizer = make_one()
    before = trace(optimizer)
    optimizer.step()
    assert trace(optimizer) != before, "the test would see it"
    before = trace(optimizer)
    ways(optimizer)
    assert trace(optimizer) == before


def test_poison_test_calls_no_hooks() -> None:
    calls: list[str] = []
    optimizer = make(lambda o: None)  # whose step calls its base's, which calls global hooks again
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("own")),
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    try:
        assert ways(optimizer) == ["flat"]
        assert calls == []
        optimizer.step()
        assert {*calls} == {"before", "after", "own"}, "they are called afterwards"
    finally:
        for handle in handles:
            handle.remove()
    assert getattr(optimizer.step, "_wrapped_by_lr_sched", False), "the scheduler still counts steps"
    assert scheduler.get_last_lr() == [0.1]


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    class Talks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            sys.stdout.write("a step\n")
            sys.stderr.write("an error\n")
            warnings.warn("a warning", stacklevel=1)
            logging.getLogger("a.logger").error("a record")
            return super().step(closure)

    optimizer = Talks([nn.Parameter(torch.ones(3))], lr=0.1)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        assert ways(optimizer) == ["flat"]
    finally:
        logging.getLogger().removeHandler(handler)
    assert capfd.readouterr() == ("", "")
    with pytest.warns(UserWarning, match="a warning"):
        optimizer.step()
    assert "a step" in capfd.readouterr().out


def by_closure(params: list[nn.Parameter]) -> Calls:
    return Calls(params, lambda o: [param.data.mul_(0.5) for param in params])


def by_module(params: list[nn.Parameter]) -> Calls:
    model = nn.ParameterList(params)
    return Calls(params, lambda o: [param.data.mul_(0.5) for param in o.model], model=model)


def only_where_a_gradient_is_nan(params: list[nn.Parameter]) -> Calls:
    def call(o: Any) -> None:
        if any(param.grad.isnan().any() for group in o.param_groups for param in group["params"]):
            params[0].data.zero_()

    return Calls(params, call)


@pytest.mark.parametrize("make_one", [by_closure, by_module, only_where_a_gradient_is_nan])
def test_step_reaching_the_model_is_stopped(make_one: Any) -> None:
    params = [nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(5))]
    (one,) = classify(make_one(params), CPU, torch.float32)
    assert one.way == "refused"
    assert make_one is only_where_a_gradient_is_nan or "by another way than its groups" in one.reason
    assert all(bool((param == 1).all()) for param in params)


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    (one,) = classify(make(lambda o: None, lock=threading.Lock()), CPU, torch.float32)
    assert one.way == "refused"
    assert "its attribute 'lock' cannot be copied" in one.reason
