"""Trial steps leave no trace in random numbers and in the objects of an optimizer's attributes."""

from __future__ import annotations

import collections
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megastrategy.core.trials.probe import probe

CPU = torch.device("cpu")


class Ramp:
    """A schedule that is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1.0 if self.calls <= 60 else 0.1

    def next(self) -> float:
        return self()


class Counts(torch.optim.SGD):
    """Calls what it is given before each step, once."""

    def __init__(self, params: Any, count: Callable[[Any], Any], **attributes: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.count = count
        vars(self).update(attributes)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.count(self)
        return super().step(closure)


def make(count: Callable[[Any], Any], **attributes: Any) -> Counts:
    torch.manual_seed(0)
    return Counts([nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))], count, **attributes)


def numpys_draw(_: Any) -> Any:
    return sys.modules["numpy"].random.rand()


COUNTING: dict[str, tuple[Callable[[], Counts], Callable[[Counts], Any]]] = {
    "an object that is called": (lambda: make(lambda o: o.ramp(), ramp=Ramp()), lambda o: o.ramp.calls),
    "a bound method": (lambda: make(lambda o: o.ramp(), ramp=Ramp().next), lambda o: o.ramp.__self__.calls),
    "a partial": (
        lambda: make(lambda o: o.ramp(), ramp=functools.partial(Ramp.next, Ramp())),
        lambda o: o.ramp.args[0].calls,
    ),
    "a deque": (
        lambda: make(lambda o: o.seen.append(1), seen=collections.deque(maxlen=100)),
        lambda o: list(o.seen),
    ),
    "Python's random numbers": (lambda: make(lambda o: random.random()), lambda o: random.getstate()),
    "numpy's random numbers": (
        lambda: make(numpys_draw),
        lambda o: [list(value) if hasattr(value, "tolist") else value for value in numpys_state()],
    ),
    "torch's random numbers": (lambda: make(lambda o: torch.rand(3)), lambda o: torch.get_rng_state().tolist()),
    "a generator of torch's": (
        lambda: make(lambda o: torch.rand(3, generator=o.generator), generator=torch.Generator()),
        lambda o: o.generator.get_state().tolist(),
    ),
    "a generator of Python's": (
        lambda: make(lambda o: o.generator.random(), generator=random.Random(3)),
        lambda o: o.generator.getstate(),
    ),
    "a tensor behind a function": (
        lambda: make(functools.partial(lambda sums, o: sums.add_(1), torch.zeros(3))),
        lambda o: o.count.args[0].tolist(),
    ),
}  # fmt: skip


def numpys_state() -> Any:
    return sys.modules["numpy"].random.get_state()


@pytest.mark.parametrize(("make_one", "counted"), COUNTING.values(), ids=COUNTING)
def test_trial_steps_leave_no_trace(make_one: Any, counted: Any) -> None:
    pytest.importorskip("numpy")
    optimizer = make_one()
    before = counted(optimizer)
    optimizer.step()
    assert counted(optimizer) != before, "the test would see it"
    before = counted(optimizer)
    findings = probe(optimizer, CPU, torch.float32)
    assert counted(optimizer) == before
    assert findings.reason is None
    assert not findings.in_parts, "it is called once a step"


def test_two_ranks_with_other_random_numbers_find_the_same() -> None:
    """The result of a step that draws must not depend on the program's numbers."""

    class Sometimes(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure) if random.random() < 0.5 else None

    found = []
    for seed in range(6):
        random.seed(seed)
        found.append(probe(Sometimes([nn.Parameter(torch.randn(4, 5))], lr=0.1), CPU, torch.float32))
    assert all(one == found[0] for one in found)
