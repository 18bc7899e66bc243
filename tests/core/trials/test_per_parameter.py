"""Which optimizers step each parameter by itself, as trial steps find out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megastrategy.core.trials.elementwise import Findings
from megastrategy.core.trials.probe import probe
from tests.support import optimizers

CPU = torch.device("cpu")


def params(*shapes: tuple[int, ...]) -> list[Parameter]:
    return [Parameter(torch.zeros(shape)) for shape in shapes or ((9, 4), (5,), (3, 2, 3, 3), (90, 60))]


def found(optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> Findings:
    return probe(optimizer, CPU, dtype)


def matrices(kind: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    return lambda **options: kind(params((9, 4), (90, 60)), **options)


BY_PARAMETER = [
    optimizers.Lamb,
    optimizers.LambWithMoments,
    optimizers.Shampoo,
    optimizers.Projected,
    optimizers.NormHistory,
    optimizers.CautiousMask,
    optimizers.CentredKernels,
    optimizers.DecaysMatrices,
    optimizers.InBlocks,
    optimizers.KeepsNested,
    optimizers.CountsCalls,
    optimizers.WrapsState,
    torch.optim.Adafactor,
]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (kind, dtype)
        for kind in BY_PARAMETER
        for dtype in (torch.float32, torch.float64)
        if (kind, dtype) != (optimizers.InBlocks, torch.float64)  # its blocks are in fp32
    ],
)
def test_each_parameter_by_itself(kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> None:
    findings = found(kind(params()), dtype)
    assert findings.reason is None
    assert findings.whole_groups == {0}
    assert not findings.element_names, "of shards"
    assert findings.in_parts == (kind is not optimizers.CountsCalls)


@pytest.mark.parametrize(
    "kind", [optimizers.GloballyNormalised, optimizers.DistanceInGroup, optimizers.TinySteps, torch.optim.LBFGS]
)
def test_what_looks_at_all_parameters_is_refused(kind: Callable[..., torch.optim.Optimizer]) -> None:
    reason = found(kind(params())).reason
    assert reason is not None
    assert "; nor can ranks step whole parameters each: " in reason


def test_what_hardly_moves_is_refused_since_its_trials_tell_nothing() -> None:
    """LDoG's distance begins at a millionth, and what it estimates may look at all parameters later."""
    assert "moved weights of size 1 by" in str(found(optimizers.DistanceOverGradients(params())).reason)


def test_muon_is_tried_with_matrices_since_it_refuses_others() -> None:
    assert found(torch.optim.Muon(params((9, 4), (90, 60)))).whole_groups == {0}


def test_a_coupling_of_two_tensors_of_one_shape_is_seen() -> None:
    """As of an optimizer that takes those of one shape as a batch, and a mean over it."""

    class InBatches(optimizers.Simple):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for param in optimizers.stepped(self):
                by_shape.setdefault(param.shape, []).append(param)
            for alike in by_shape.values():
                scale = torch.stack([param.grad.norm() for param in alike if param.grad is not None]).mean()
                for param in alike:
                    param.sub_(param.grad / scale, alpha=0.1)

    reason = found(InBatches(params())).reason
    assert reason is not None
    assert "was stepped without the others" in reason


def test_state_that_depends_on_others_is_seen() -> None:
    class Ranked(optimizers.Simple):
        """Steps by the norm of each, and notes how many there are."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            every = list(optimizers.stepped(self))
            for param in every:
                assert param.grad is not None
                self.state[param]["among"] = len(every)
                param.sub_(param.grad / param.grad.norm(), alpha=0.1)

    assert "state 'among' of a tensor depends on the others" in str(found(Ranked(params())).reason)


class ByProportions(optimizers.Simple):
    """Scales rows of a matrix of some proportions by their norm, and is element-wise with all others."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        least, most = group["proportions"]
        if param.dim() == 2 and least <= param.shape[0] / param.shape[1] <= most:
            grad = grad / (grad.norm(dim=1, keepdim=True) + 1e-8)
        param.sub_(grad, alpha=group["lr"])


@pytest.mark.parametrize(
    ("proportions", "is_whole"), [((1.0, 1.0), True), ((20.0, 1e9), True), ((0.0, 0.05), True), ((1e9, 1e9), False)]
)
def test_an_update_of_square_tall_or_wide_matrices_is_seen(proportions: tuple[float, float], is_whole: bool) -> None:
    """Shards of a symmetric update, or of embeddings that are normed by row, would lack it without a sign."""
    findings = found(ByProportions(params((16, 16), (900, 8), (5,)), proportions=proportions))
    assert findings.reason is None
    assert findings.whole_groups == ({0} if is_whole else set())


def test_what_cannot_be_saved_is_refused() -> None:
    one = lambda: 1  # noqa: E731 - which no file can hold

    class KeepsFunction(optimizers.Simple):
        def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            state["step"] = one
            param.sub_(grad / grad.norm(), alpha=0.1)

    assert "state 'step' cannot be saved" in str(found(KeepsFunction(params())).reason)


def test_parameters_in_an_attribute_are_not_stepped_in_a_trial() -> None:
    class Keeps(optimizers.Lamb):
        def __init__(self, params: list[Parameter]) -> None:
            super().__init__(params)
            self.matrices = [param for param in params if param.dim() == 2]

    own = params()
    assert "attribute 'matrices' holds the parameters themselves" in str(found(Keeps(own)).reason)
    assert all(param.eq(0).all() for param in own)


def test_groups_are_decided_one_by_one() -> None:
    optimizer = optimizers.MatricesAndRest(
        [
            {"params": params((3,))},
            {"params": params((9, 4)), "by_row": True},
            {"params": params((4, 4)), "by_row": True, "lr": 0.5},
            {"params": []},
        ]
    )
    findings = found(optimizer)
    assert findings.whole_groups == {1, 2}
    assert findings.element_names == {"momentum", "square"}
    assert findings.whole_tensors == {2: 1}
