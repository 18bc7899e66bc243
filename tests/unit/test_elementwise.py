"""The probe that decides whether an optimizer may be sharded flat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megastrategy.core.elementwise import probe_state_tensors, why_not_elementwise
from tests.ranks.test_parity import OPTIMIZERS

CPU = torch.device("cpu")


class Lamb(torch.optim.Optimizer):
    """Layer-wise: the step is scaled by the norm of the whole parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class GloballyNormalised(torch.optim.Optimizer):
    """Element-wise but for one number: the norm over all tensors of the optimizer, which a rank sees a part of."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / norm, alpha=group["lr"])


class NoisySGD(torch.optim.Optimizer):
    """Element-wise in distribution, but not in numbers: two runs differ, so it cannot be said to be safe."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad + torch.randn_like(param), alpha=group["lr"])


class SignSGD(torch.optim.Optimizer):
    """Not torch's, element-wise: must pass without being on any list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=group["lr"])


def params() -> list[Tensor]:
    return [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_optimizers_are_element_wise(name: str, dtype: torch.dtype) -> None:
    kind, options = OPTIMIZERS[name]
    assert why_not_elementwise(getattr(torch.optim, kind)(params(), **options), CPU, dtype) is None


def test_an_unknown_element_wise_optimizer_passes() -> None:
    assert why_not_elementwise(SignSGD(params()), CPU, torch.float32) is None


@pytest.mark.parametrize("kind", [Lamb, GloballyNormalised, NoisySGD, torch.optim.Adafactor])
def test_what_looks_beyond_the_element_is_found(kind: Any) -> None:
    reason = why_not_elementwise(kind(params()), CPU, torch.float32)
    assert reason is not None
    assert "flat pieces" in reason


@pytest.mark.parametrize("lr", [0.0, 1e-12, torch.tensor(0.0)])
def test_a_learning_rate_that_warms_up_from_zero_hides_nothing(lr: Any) -> None:
    assert "flat pieces" in str(why_not_elementwise(Lamb(params(), lr=lr), CPU, torch.float32))
    optimizer = torch.optim.AdamW(params(), lr=lr, foreach=False)
    assert why_not_elementwise(optimizer, CPU, torch.float32) is None
    assert optimizer.param_groups[0]["lr"] is lr


def test_steps_that_move_nothing_prove_nothing() -> None:
    class Idle(Lamb):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            pass

    assert "moved nothing" in str(why_not_elementwise(Idle(params()), CPU, torch.float32))


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon])
def test_what_cannot_step_flat_pieces_is_found(make: Any) -> None:
    optimizer = make([torch.nn.Parameter(torch.ones(4, 4))])
    reason = why_not_elementwise(optimizer, CPU, torch.float32)
    assert reason is not None


def test_one_group_of_many_that_is_not_element_wise_is_named() -> None:
    class Mixed(Lamb):
        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    scale = param.grad.norm() if group["layerwise"] else 1.0
                    param.sub_(param.grad / scale, alpha=group["lr"])

    first, second = params()
    optimizer = Mixed([{"params": [first], "layerwise": False}, {"params": [second], "layerwise": True}])
    reason = why_not_elementwise(optimizer, CPU, torch.float32)
    assert reason is not None
    assert "group 1" in reason


def test_the_optimizer_is_left_as_it_was() -> None:
    own = params()
    optimizer = torch.optim.AdamW(own, lr=0.1)
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(args))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    why_not_elementwise(optimizer, CPU, torch.float32)
    assert calls == [], "the user's hooks do not run"
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == own
    assert [bool((param == 1).all()) for param in own] == [True, True]
    assert getattr(optimizer.step, "_wrapped_by_lr_sched", False), "the scheduler still counts steps"
    assert scheduler.get_last_lr() == [0.1]


def test_state_tensors_are_counted() -> None:
    counts = {"SGD": 0, "Adam": 2, "RMSprop": 1}
    for kind, count in counts.items():
        assert probe_state_tensors(getattr(torch.optim, kind)(params())) == count
    assert probe_state_tensors(torch.optim.AdamW(params(), amsgrad=True)) == 3
    assert probe_state_tensors(torch.optim.LBFGS(params())) is None
