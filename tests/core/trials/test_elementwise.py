"""The probe that decides whether an optimizer may be sharded flat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megastrategy.core.trials import NotForShardsError, check_main_param_steps
from megastrategy.core.trials.elementwise import Findings
from megastrategy.core.trials.per_parameter import PerParameterProbe
from megastrategy.core.trials.probe import probe
from tests.core.properties.test_parity import OPTIMIZERS
from tests.support import optimizers
from tests.support.optimizers import GloballyNormalised, Lamb, Simple
from tests.support.prepared_optimizers import CountsOnState, SumsItsState

CPU = torch.device("cpu")


class NoisySGD(Simple):
    """Element-wise in distribution, but not in numbers: two runs differ, so it cannot be said to be safe."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad + torch.randn_like(param), alpha=group["lr"])


class SignSGD(Simple):
    """Not torch's, element-wise: must pass without being on any list."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad.sign(), alpha=group["lr"])


@pytest.fixture(autouse=True)
def only_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether whole parameters would do is the question of test_per_parameter.py."""

    def refuse(probe: PerParameterProbe) -> Findings:
        raise NotForShardsError("that is not tried here")

    monkeypatch.setattr(PerParameterProbe, "findings", refuse)


def params() -> list[Tensor]:
    return [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_optimizers_are_element_wise(name: str, dtype: torch.dtype) -> None:
    kind, options = OPTIMIZERS[name]
    found = probe(getattr(torch.optim, kind)(params(), **options), CPU, dtype)
    assert found.reason is None
    assert found.in_parts, "stepped bucket by bucket, and joined"


OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "fused_amsgrad": {"fused": True, "amsgrad": True, "maximize": True},
    "tensor_lr": {"lr": torch.tensor(1e-3), "foreach": False},
    "tensor_lr_fused": {"lr": torch.tensor(1e-3), "fused": True},
    "lr_of_zero": {"lr": 0.0},
    "lr_for_finetuning": {"lr": 1e-5, "weight_decay": 0.01},
    "lr_too_small_to_move": {"lr": 1e-12, "weight_decay": 0.01},
    "large_lr": {"lr": 10.0},
}


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_adam_passes(kind: str, name: str) -> None:
    found = probe(getattr(torch.optim, kind)(params(), **OPTIONS[name]), CPU, torch.float32)
    assert found.reason is None
    assert found.in_parts
    assert found.element_names == {"exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if "amsgrad" in name else set())


@pytest.mark.parametrize("lr", [1e-6, 1e-4, 0.1, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_pass_at_any_learning_rate(name: str, lr: float) -> None:
    kind, options = OPTIMIZERS[name]
    optimizer = getattr(torch.optim, kind)(params(), **{**options, "lr": lr})
    assert probe(optimizer, CPU, torch.float32).reason is None


def test_an_unknown_element_wise_optimizer_passes() -> None:
    assert probe(SignSGD(params()), CPU, torch.float32).reason is None


COUPLED = [
    Lamb,
    GloballyNormalised,
    NoisySGD,
    torch.optim.Adafactor,
    optimizers.DistanceInGroup,
    optimizers.DistanceOverGradients,
    optimizers.TinySteps,
    optimizers.Projected,
    optimizers.NormHistory,
    optimizers.CautiousMask,
    optimizers.CentredKernels,
    optimizers.DecaysMatrices,
    optimizers.DecaysByMean,
    optimizers.ProjectedGradients,
    optimizers.ScaledByProportions,
    optimizers.KeepsLargest,
    optimizers.Patient,
]


@pytest.mark.parametrize("kind", COUPLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_looks_beyond_the_element_is_found(kind: Any, dtype: torch.dtype) -> None:
    reason = probe(kind(params()), CPU, dtype).reason
    assert reason is not None
    assert "flat pieces" in reason


@pytest.mark.parametrize("lr", [1e-12, 1e-7, 1e-5, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("kind", COUPLED[4:])
def test_no_learning_rate_hides_it(kind: Any, lr: float) -> None:
    assert "flat pieces" in str(probe(kind(params(), lr=lr), CPU, torch.float32).reason)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (optimizers.InBlocks, "state 'largest' of shape (28,), which has neither one number nor one for each"),
        (optimizers.KeepsRows, "state 'rows' of shape (7,), which has neither one number nor one for each"),
        (optimizers.KeepsMatrix, "state 'outer' of shape (500, 500), which has neither one number nor one for each"),
        (optimizers.KeepsNested, "state 'inner', tensors in a dict"),
        (optimizers.KeepsOwn, "its state_dict() and the state of its tensors differ in 'calls'"),
        (optimizers.SavesRenamed, "its state_dict() and the state of its tensors differ in 'momentum', 'renamed'"),
    ],
)
def test_what_could_not_be_saved_is_found(kind: Any, said: str) -> None:
    """The steps of all but the first are element-wise."""
    assert said in str(probe(kind(params()), CPU, torch.float32).reason)


def test_an_optimizer_that_holds_another_is_refused_before_it_steps_that() -> None:
    own = [torch.nn.Parameter(torch.ones(4, 4))]
    own[0].grad = torch.ones(4, 4)
    optimizer = optimizers.LookAhead(torch.optim.SGD(own, lr=0.1))
    with pytest.raises(NotForShardsError) as refused:
        check_main_param_steps(optimizer)
    for reason in (probe(optimizer, CPU, torch.float32).reason, refused.value):
        assert "another optimizer, its attribute 'base'" in str(reason)
        assert "Use that SGD itself" in str(reason)
    assert bool((own[0] == 1).all())


def test_what_differentiates_the_gradients_of_parameters_is_found() -> None:
    reason = probe(optimizers.SecondDerivatives(params()), CPU, torch.float32).reason
    assert "a trial step of parameter group 0 raised RuntimeError: element 0 of tensors does not require grad" in str(
        reason
    )


def test_a_count_of_calls_is_not_stepped_in_parts() -> None:
    class Counting(Simple):
        def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            param.sub_(grad, alpha=group["lr"])

        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["k"] += 1
            super().step()

    found = probe(Counting(params(), k=0), CPU, torch.float32)
    assert found.reason is None
    assert not found.in_parts


@pytest.mark.parametrize("kind", [optimizers.InBlocks, Lamb, optimizers.DistanceInGroup, optimizers.KeepsOwn])
def test_whole_main_params_may_be_stepped_by_what_is_not_element_wise(kind: Any) -> None:
    check_main_param_steps(kind(params()))


def test_whole_main_params_are_not_for_what_needs_a_closure() -> None:
    with pytest.raises(NotForShardsError, match="closure would read the 16-bit weights"):
        check_main_param_steps(optimizers.NeedsClosure(params()))


@pytest.mark.parametrize("lr", [0.0, 1e-12, torch.tensor(0.0)])
def test_a_learning_rate_that_warms_up_from_zero_hides_nothing(lr: Any) -> None:
    assert "flat pieces" in str(probe(Lamb(params(), lr=lr), CPU, torch.float32).reason)
    optimizer = torch.optim.AdamW(params(), lr=lr, foreach=False)
    assert probe(optimizer, CPU, torch.float32).reason is None
    assert optimizer.param_groups[0]["lr"] is lr


def test_steps_that_move_nothing_prove_nothing() -> None:
    class Idle(Lamb):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            pass

    reason = str(probe(Idle(params()), CPU, torch.float32).reason)
    assert "moved nothing, so they tell nothing: a step() without a closure has to move the tensors" in reason


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon])
def test_what_cannot_step_flat_pieces_is_found(make: Any) -> None:
    optimizer = make([torch.nn.Parameter(torch.ones(4, 4))])
    reason = probe(optimizer, CPU, torch.float32).reason
    assert reason is not None


def test_an_optimizer_that_counts_on_state_from_its_construction_is_tried_with_such_state() -> None:
    found = probe(CountsOnState(params()), CPU, torch.float32)
    assert found.reason is None
    assert found.element_names == {"sum", "total", "mask"}
    assert "a trial tensor" in str(probe(SumsItsState(params()), CPU, torch.float32).reason)
    of_a_scalar_first = CountsOnState([torch.nn.Parameter(torch.ones(())), *params()])
    assert probe(of_a_scalar_first, CPU, torch.float32) == found
    of_scalars = CountsOnState([torch.nn.Parameter(torch.ones(()))])
    assert probe(of_scalars, CPU, torch.float32) == found
    without = CountsOnState(params())
    without.state.clear()
    assert "KeyError: 'step'" in str(probe(without, CPU, torch.float32).reason)


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
    reason = probe(optimizer, CPU, torch.float32).reason
    assert reason is not None
    assert "group 1" in reason


def test_the_optimizer_is_left_as_it_was() -> None:
    own = params()
    watching = optimizers.KeepsLargest(params())
    probe(watching, CPU, torch.float32)
    assert watching.watch.largest == 0, "nor do objects that it keeps change"
    optimizer = torch.optim.AdamW(own, lr=0.1)
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(args))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    probe(optimizer, CPU, torch.float32)
    assert calls == [], "the user's hooks do not run"
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == own
    assert [bool((param == 1).all()) for param in own] == [True, True]
    assert getattr(optimizer.step, "_wrapped_by_lr_sched", False), "the scheduler still counts steps"
    assert scheduler.get_last_lr() == [0.1]
