"""How the poison test divides optimizers: flat, whole or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megastrategy.core.judge.classification import GroupClass, classify
from tests.support import optimizers
from tests.support.optimizers import AdamByAnotherName, Simple, stepped
from tests.support.optimizers_with_methods import ScheduleFree
from tests.support.prepared_optimizers import CountsOnState, SumsItsState

CPU = torch.device("cpu")


def params(*shapes: tuple[int, ...]) -> list[Parameter]:
    return [Parameter(torch.zeros(shape)) for shape in shapes or ((9, 4), (5,), (3, 2, 3, 3), (90, 60))]


def found(optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> GroupClass:
    (one,) = classify(optimizer, CPU, dtype)
    return one


class SignSGD(Simple):
    """Element-wise."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad.sign(), alpha=group["lr"])


class Noisy(Simple):
    """Draws a number for each element."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad + torch.randn_like(param), alpha=group["lr"])


class Clips(Simple):
    """Clips by the norm of all gradients, which only large ones exceed."""

    def __init__(self, params: Any, max_norm: float = 1e6) -> None:
        super().__init__(params, max_norm=max_norm)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(list(stepped(self)), self.param_groups[0]["max_norm"])
        super().step()

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"])


class ByPlace(Simple):
    """Decays the rate by the place in the group, as where layers come in their order."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for place, param in enumerate(stepped(self)):
            param.sub_(param.grad, alpha=0.1 * 0.9**place)  # type: ignore[arg-type]


class SkipsIfAnyIsNaN(SignSGD):
    """Skips a step where any gradient is NaN."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not any(bool(param.grad.isnan().any()) for param in stepped(self) if param.grad is not None):
            super().step()


class ActsOnNegative(SignSGD):
    """Takes a mean only where nearly all gradients of a parameter are negative."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        is_rare = (grad > 0).float().mean() < 0.01
        param.sub_(grad.mean() if is_rare else grad, alpha=group["lr"])


class ListsParameters(optimizers.Lamb):
    """Keeps a list of its parameters, for a ``zero_grad`` of its own."""

    def __init__(self, params: list[Parameter]) -> None:
        super().__init__(params)
        self.matrices = [param for param in params if param.dim() == 2]


class Idle(optimizers.Lamb):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


OTHERS = "a parameter changes with the gradients of others"
PARTS = "the parts that a rank has become others than among all"
ANSWERS: list[tuple[Callable[..., torch.optim.Optimizer], str, str]] = [
    (SignSGD, "flat", ""),
    (AdamByAnotherName, "flat", ""),
    (ScheduleFree, "flat", ""),
    (optimizers.Averaging, "flat", ""),
    (optimizers.Buffered, "flat", ""),
    (CountsOnState, "flat", ""),
    (optimizers.Lamb, "whole", "an element changes with the gradients of others"),
    (optimizers.LambWithMoments, "whole", "an element changes"),
    (optimizers.Shampoo, "whole", "it keeps state 'factors', tensors in a list"),
    (optimizers.Projected, "whole", "an element changes"),
    (optimizers.ProjectedGradients, "whole", "an element changes"),
    (optimizers.NormHistory, "whole", "an element changes"),
    (optimizers.DistanceOverGradients, "whole", "an element changes"),
    (optimizers.CautiousMask, "whole", "an element changes"),
    (optimizers.CentredKernels, "whole", "an element changes"),
    (optimizers.DecaysMatrices, "whole", PARTS),
    (optimizers.ScaledByProportions, "whole", PARTS),
    (optimizers.InBlocks, "whole", "it keeps state 'largest' of shape (72,)"),
    (optimizers.KeepsNested, "whole", "it keeps state 'inner', tensors in a dict"),
    (optimizers.SavesRenamed, "whole", "state that its state_dict() has under other names than ['momentum']"),
    (optimizers.WrapsState, "whole", "state that its state_dict() has under other names"),
    (optimizers.Patient, "whole", "an element changes"),
    (optimizers.CountsCalls, "whole", "an element changes"),
    (SumsItsState, "whole", "an element changes"),
    (ActsOnNegative, "whole", "an element changes"),
    (ListsParameters, "whole", "an element changes"),
    (torch.optim.Adafactor, "whole", "it keeps state"),
    (optimizers.GloballyNormalised, "refused", PARTS),
    (optimizers.TinySteps, "refused", PARTS),
    (optimizers.DistanceInGroup, "refused", "an option or attribute becomes another"),
    (optimizers.DecaysByMean, "refused", PARTS),
    (optimizers.KeepsLargest, "refused", "an option or attribute becomes another"),
    (Clips, "refused", OTHERS),
    (SkipsIfAnyIsNaN, "refused", OTHERS),
    (ByPlace, "refused", PARTS),
    (Noisy, "refused", "an element changes"),
    (optimizers.KeepsOwn, "refused", "it keeps state 'calls', which belongs to no parameter"),
    (optimizers.SecondDerivatives, "refused", "raised RuntimeError: element 0 of tensors does not require grad"),
    (optimizers.NeedsClosure, "refused", "missing 1 required positional argument: 'closure'"),
    (Idle, "refused", "change no parameter of group 0: a step() without a closure has to"),
    (torch.optim.LBFGS, "refused", "missing 1 required positional argument: 'closure'"),
    (torch.optim.SparseAdam, "refused", "does not support dense gradients"),
]


@pytest.mark.parametrize(("kind", "way", "reason"), ANSWERS, ids=[kind.__name__ for kind, _, _ in ANSWERS])
def test_every_optimizer_is_divided_as_it_can_be(kind: Any, way: str, reason: str) -> None:
    one = found(kind(params()))
    assert (one.way, reason in one.reason) == (way, True), one


@pytest.mark.parametrize("lr", [0.0, 1e-12, 1e-5, 1.0, torch.tensor(0.0)])
def test_no_rate_hides_what_an_optimizer_reads(lr: Any) -> None:
    optimizer = AdamByAnotherName(params(), lr=lr, foreach=False)
    assert found(optimizer).way == "flat"
    assert optimizer.param_groups[0]["lr"] is lr
    assert found(optimizers.Lamb(params(), lr=lr)).way == "whole"
    assert found(optimizers.DecaysByMean(params(), lr=lr)).way == "refused"


def test_muon_is_tested_with_matrices() -> None:
    assert found(torch.optim.Muon(params((9, 4), (90, 60)))).way == "whole"


def test_groups_are_classified_one_by_one() -> None:
    groups = [
        {"params": params((3,))},
        {"params": params((9, 4)), "by_row": True},
        {"params": params((4, 4)), "by_row": True, "lr": 0.5},
        {"params": []},
    ]
    classes = classify(optimizers.MatricesAndRest(groups), CPU, torch.float32)
    assert [one.way for one in classes] == ["flat", "whole", "whole", "flat"]
    assert classes[0].element_names == {"momentum", "square"}
    assert classes[1].num_kept == {2: 1}


class KeepsItsKind(Simple):
    """Notes in the state of each parameter, when it is constructed, how it is stepped, as Muon's reference does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            is_by_row = group.get("kind", "by row") == "by row"
            for param in group["params"]:
                if is_by_row and param.dim() != 2:
                    raise ValueError("only matrices have rows")
                self.state[param]["is_by_row"] = is_by_row

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if state["is_by_row"]:
            grad = grad / (grad.norm(dim=1, keepdim=True) + 1e-8)
        param.sub_(grad, alpha=group["lr"])


def test_state_of_the_constructor_is_that_of_the_group() -> None:
    groups = [{"params": params((9, 4))}, {"params": params((5,)), "kind": "by element"}]
    classes = classify(KeepsItsKind(groups), CPU, torch.float32)
    assert [one.way for one in classes] == ["whole", "flat"], classes


def test_scalars_are_tested_as_the_tensor_that_joins_them() -> None:
    """A norm of one scalar is the scalar itself, and one of their run is not; state of shape () may be a counter."""
    assert found(optimizers.LambWithMoments(params((), ()))).way == "whole"
    flat = found(AdamByAnotherName(params(())))
    assert flat.way == "flat"
    assert flat.element_names == {"exp_avg", "exp_avg_sq"}


def test_names_of_elementwise_state_are_found() -> None:
    one = found(ScheduleFree(params()))
    assert one.element_names == {"z", "square"}
    assert one.changed_options == {"k", "weight_sum", "train_mode"}
    for of_a_scalar in (CountsOnState([Parameter(torch.ones(())), *params()]), CountsOnState(params())):
        assert found(of_a_scalar).element_names == {"sum", "total", "mask"}


@pytest.mark.parametrize(("proportions", "way"), [((1.0, 1.0), "whole"), ((6.0, 7.0), "whole"), ((1e9, 1e9), "flat")])
def test_updates_of_square_or_tall_matrices_are_seen(proportions: tuple[float, float], way: str) -> None:
    class ByProportions(Simple):
        """Scales rows of a matrix of some proportions by their norm, and is element-wise with all others."""

        def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            least, most = group["proportions"]
            if param.dim() == 2 and least <= param.shape[0] / param.shape[1] <= most:
                grad = grad / (grad.norm(dim=1, keepdim=True) + 1e-8)
            param.sub_(grad, alpha=group["lr"])

    assert found(ByProportions(params((16, 16), (900, 8), (5,)), proportions=proportions)).way == way


OPTIONS: dict[type[torch.optim.Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "fused": True, "weight_decay": 0.1}],
    torch.optim.Adam: [{}, {"amsgrad": True}, {"fused": True, "amsgrad": True}, {"lr": torch.tensor(0.1)}],
    torch.optim.AdamW: [
        {},
        {"foreach": True},
        {"fused": True, "maximize": True},
        {"amsgrad": True, "betas": (0.0, 0.9)},
    ],
    torch.optim.NAdam: [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    torch.optim.RAdam: [{}, {"foreach": True}],
    torch.optim.Adagrad: [{}, {"lr_decay": 0.1, "initial_accumulator_value": 1.0}, {"fused": True}],
    torch.optim.Adadelta: [{}, {"foreach": True, "weight_decay": 0.1}],
    torch.optim.Adamax: [{}, {"foreach": True}],
    torch.optim.RMSprop: [{}, {"momentum": 0.9, "centered": True}],
    torch.optim.Rprop: [{}, {"foreach": True}],
    torch.optim.ASGD: [{}, {"foreach": True, "weight_decay": 0.1}],
}


@pytest.mark.parametrize(("kind", "options"), [(kind, one) for kind, several in OPTIONS.items() for one in several])
def test_the_poison_test_finds_what_is_remembered(kind: Any, options: dict[str, Any]) -> None:
    derived = type(kind.__name__, (kind,), {})
    remembered = found(kind(params(), **{"lr": 1e-6, **options}))
    tested = found(derived(params(), **{"lr": 1e-6, **options}))
    assert (tested.way, tested.is_tested, remembered.is_tested) == ("flat", True, False)
    assert tested.element_names == remembered.element_names
    assert not tested.changed_options
