"""Which optimizers step each parameter by itself, as trial steps find out."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megastrategy.core.trials.elementwise import Findings
from megastrategy.core.trials.per_parameter import trial_shapes
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


@pytest.mark.parametrize("numel", [4096, 5400])
def test_a_coupling_of_large_tensors_alone_is_seen(numel: int) -> None:
    class Large(optimizers.Simple):
        """Steps tensors of a block's size by their common norm, and others by their own."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            grads = [param.grad for param in optimizers.stepped(self) if param.grad is not None]
            common = torch.stack([grad.norm() for grad in grads if grad.numel() >= 4096] or [torch.ones(())]).norm()
            for param in optimizers.stepped(self):
                assert param.grad is not None
                norm = common if param.numel() >= 4096 else param.grad.norm()
                param.sub_(param.grad / norm, alpha=0.1)

    reason = found(Large(params((9, 4), (numel // 54, 54) if numel > 4096 else (64, 64)))).reason
    assert "was stepped without the others" in str(reason)


def test_a_deque_in_the_state_is_looked_into() -> None:
    class Delayed(optimizers.Simple):
        def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            queue = state.setdefault("grads", collections.deque(maxlen=2))
            queue.append(grad.clone())
            param.sub_(queue[0] / queue[0].norm(), alpha=0.1)

    assert found(Delayed(params())).whole_groups == {0}


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


def test_shapes_of_trials_have_the_dimensions_of_the_parameters() -> None:
    assert {len(shape) for shape in trial_shapes([(3, 4), (5,), (), (2, 2, 2, 2)])} == {0, 1, 2, 4}
    assert max(map(torch.Size.numel, map(torch.Size, trial_shapes([(90, 60)])))) >= 4096
    assert max(map(torch.Size.numel, map(torch.Size, trial_shapes([(9, 6)])))) < 4096, "no parameter is that large"


def test_random_numbers_of_the_program_stay_as_they_are() -> None:
    class Noisy(optimizers.Simple):
        def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            param.sub_(grad / grad.norm() + torch.randn(()), alpha=0.1)

    before = torch.get_rng_state()
    assert probe(Noisy(params()), CPU, torch.float32).reason is not None
    assert torch.equal(torch.get_rng_state(), before)


class InFloat8(torch.optim.Optimizer):
    """Momentum in 8 bits, for which torch has no arithmetic; by rows where ``by_rows``.

    Beyond 448 the conversion makes a NaN before torch 2.13, and 448 since; with ``dtype`` another format or 16 bits.
    """

    def __init__(
        self, params: Any, lr: float = 0.1, by_rows: bool = False, dtype: torch.dtype = torch.float8_e4m3fn
    ) -> None:
        super().__init__(params, {"lr": lr, "by_rows": by_rows, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                kept = state["momentum"].to(param.dtype) * 0.5 if state else torch.zeros_like(param)
                update = kept + param.grad
                if group["by_rows"] and param.dim() > 1:
                    update /= update.norm(dim=-1, keepdim=True)
                state["momentum"] = update.to(group["dtype"])
                param.sub_(update, alpha=group["lr"])


@pytest.mark.parametrize("by_rows", [False, True])
def test_state_of_a_dtype_without_arithmetic_is_compared(by_rows: bool) -> None:
    assert found(InFloat8(params(), by_rows=by_rows)).whole_groups == ({0} if by_rows else set())
    assert found(InFloat8(params(), by_rows=by_rows)).reason is None


class Overflows(InFloat8):
    """State that is ``beyond`` where the momentum is large, and by rows where asked: each tensor's is its own."""

    beyond = float("nan")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                size = param.grad.norm() if group["by_rows"] else param.grad.abs()
                seen = torch.where(size > 1.0, self.beyond, param.grad)
                self.state[param]["seen"] = seen.to(group["dtype"])
                param.sub_(param.grad, alpha=group["lr"])


class OverflowsToInfinity(Overflows):
    beyond = float("inf")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("kind", [Overflows, OverflowsToInfinity])
def test_a_state_that_overflows_is_compared_as_what_it_is(
    kind: type[Overflows], by_rows: bool, dtype: torch.dtype
) -> None:
    findings = found(kind(params(), by_rows=by_rows, dtype=dtype))
    assert findings.reason is None
    assert findings.whole_groups == ({0} if by_rows else set())


class OverflowsTogether(Overflows):
    """Its NaNs depend on the gradients of all tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            together = sum(param.grad.norm() for param in group["params"])
            for param in group["params"]:
                seen = torch.where(param.grad.abs() > together / 20, self.beyond, param.grad)
                self.state[param]["seen"] = seen.to(group["dtype"])
                param.sub_(param.grad, alpha=group["lr"])


def test_nans_in_other_places_are_a_difference() -> None:
    reason = found(OverflowsTogether(params(), dtype=torch.float32)).reason
    assert reason is not None
    assert "state 'seen'" in reason
