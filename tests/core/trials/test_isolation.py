"""Trial steps leave no trace in the program, wherever a step of the user's counts."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megastrategy.core.trials.method_trial import try_call
from megastrategy.core.trials.optimizer_copy import Call
from megastrategy.core.trials.probe import probe

CPU = torch.device("cpu")

COUNT = 0
COUNTS: dict[str, Any] = {"calls": 0, "nested": [0]}
MODULE = types.ModuleType("settings_of_a_project")
MODULE.calls = 0  # type: ignore[attr-defined]


class Ramp:
    """A schedule that is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1.0 if self.calls <= 60 else 0.1

    def next(self) -> float:
        return self()


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class OfTheClass:
    calls = 0


def in_a_closure() -> Callable[[], None]:
    calls = 0
    kept = [0]

    def count() -> None:
        nonlocal calls
        calls += 1
        kept[0] += 1

    return count


def by_attribute() -> None:
    by_attribute.calls += 1  # type: ignore[attr-defined]


by_attribute.calls = 0  # type: ignore[attr-defined]


def count_in_globals() -> None:
    global COUNT
    COUNT += 1
    COUNTS["calls"] += 1
    COUNTS["nested"][0] += 1
    MODULE.calls += 1


class Counts(torch.optim.SGD):
    """Calls what it is given before each step, once."""

    num_steps = 0

    def __init__(self, params: Any, count: Callable[[Any], Any], **attributes: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.count = count
        vars(self).update(attributes)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.count(self)
        return super().step(closure)


def count_steps(optimizer: Counts) -> None:
    type(optimizer).num_steps += 1
    OfTheClass.calls += 1


def make(count: Callable[[Any], Any], **attributes: Any) -> Counts:
    torch.manual_seed(0)
    return Counts([nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))], count, **attributes)


def numpys_draw(_: Any) -> Any:
    return sys.modules["numpy"].random.rand()


closure = in_a_closure()

COUNTING: dict[str, tuple[Callable[[], Counts], Callable[[Counts], Any]]] = {
    "an object that is called": (lambda: make(lambda o: o.ramp(), ramp=Ramp()), lambda o: o.ramp.calls),
    "a bound method": (lambda: make(lambda o: o.ramp(), ramp=Ramp().next), lambda o: o.ramp.__self__.calls),
    "a partial": (
        lambda: make(lambda o: o.ramp(), ramp=functools.partial(Ramp.next, Ramp())),
        lambda o: o.ramp.args[0].calls,
    ),
    "a closure": (
        lambda: make(lambda o: o.ramp(), ramp=closure),
        lambda o: [copy.copy(cell.cell_contents) for cell in closure.__closure__ or ()],
    ),
    "an attribute of a function": (lambda: make(lambda o: by_attribute()), lambda o: by_attribute.calls),  # type: ignore[attr-defined]
    "globals": (
        lambda: make(lambda o: count_in_globals()),
        lambda o: (COUNT, copy.deepcopy(COUNTS), MODULE.calls),
    ),
    "classes": (lambda: make(count_steps), lambda o: (Counts.num_steps, OfTheClass.calls)),
    "a deque": (
        lambda: make(lambda o: o.seen.append(1), seen=collections.deque(maxlen=100)),
        lambda o: list(o.seen),
    ),
    "slots": (
        lambda: make(lambda o: setattr(o.kept, "calls", o.kept.calls + 1), kept=Slotted()),
        lambda o: o.kept.calls,
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


def test_a_step_that_changes_nothing_outside_may_be_several_calls() -> None:
    findings = probe(make(lambda o: None, ramp=Ramp()), CPU, torch.float32)
    assert findings.reason is None
    assert findings.in_parts


def test_an_object_that_raises_for_names_that_it_does_not_know_is_no_generator() -> None:
    class Strict:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise ValueError(f"{name!r} is not registered")

    strict = Strict()
    assert probe(make(lambda o: strict), CPU, torch.float32).reason is None


def rates() -> Iterator[float]:
    for number in itertools.count():
        yield 1.0 / (1 + number)


@pytest.mark.parametrize("iterator", [rates(), itertools.count(), iter([1.0] * 1000)])
def test_an_iterator_that_trials_advance_is_refused_by_name(iterator: Any) -> None:
    findings = probe(make(lambda o: next(o.rates), rates=iterator), CPU, torch.float32)
    assert findings.reason == "trial steps advanced its attribute 'rates', which cannot be put back"


def test_an_iterator_that_is_not_advanced_is_none_of_trials_business() -> None:
    assert probe(make(lambda o: None, rates=rates()), CPU, torch.float32).reason is None


def test_trials_of_methods_leave_no_trace() -> None:
    class Switches(Counts):
        def switch(self) -> None:
            self.ramp.next()
            self.count(self)
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(2.0)

    switched = Switches([nn.Parameter(torch.randn(4, 5))], lambda o: count_in_globals(), ramp=Ramp())
    before = COUNT, copy.deepcopy(COUNTS), switched.ramp.calls
    try_call(switched, Call(Switches.switch), CPU, torch.float32)
    assert (COUNT, COUNTS, switched.ramp.calls) == before


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
