"""Shards are stepped as few large tensors, and the state does not show it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.layout.blocks import HOST_BLOCK_NUMEL
from tests.support.kept_lists import Notes
from tests.support.optimizers import Simple
from tests.support.ranks import run_ranks
from tests.support.whole_params import SOME, batch


class Many(nn.Module):
    """Small parameters, each used by itself: ``forward`` takes the numbers of the ones to use."""

    def __init__(self, count: int, numel: int = 10, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(numel, generator=generator).to(dtype) for _ in range(count)]
        self.weights = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self, used: list[int], factor: float) -> Tensor:
        return factor * torch.stack([self.weights[i].float().square().sum() for i in used]).sum()


class Setup:
    def __init__(
        self,
        group: ProcessGroup,
        module: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=0.1),
        **options: Any,
    ) -> None:
        self.module = module
        self.model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
        self.stepped = Notes()  # by call, by group
        inner = make(self.model.parameters())
        step = type(inner).step

        class Noting(type(inner)):  # type: ignore[misc]
            def step(noting, closure: Any = None) -> None:
                self.stepped.append([list(group["params"]) for group in noting.param_groups])
                step(noting)

        inner.__class__ = Noting
        self.optimizer = DistributedOptimizer(inner, self.model)

    def step(self, *args: Any) -> None:
        self.stepped.clear()
        self.optimizer.zero_grad()
        self.model(*args).backward()
        self.optimizer.step()


def reference(
    module: nn.Module, steps: list[tuple[list[int], float]], make: Callable[[Any], torch.optim.Optimizer]
) -> tuple[list[Tensor], dict[str, Any]]:
    optimizer = make(module.parameters())
    for used, factor in steps:
        optimizer.zero_grad()
        module(used, factor).backward()
        optimizer.step()
    return [param.detach() for param in module.parameters()], optimizer.state_dict()


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert state["state"][index].keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(state["state"][index][name]), torch.as_tensor(value)), (index, name)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=0.01)


ALL = list(range(12))


def without(left_out: int) -> list[int]:
    return [i for i in ALL if i != left_out]


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def test_many_params_step_as_one_tensor_a_bucket() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, Many(200), bucket_size=4000)
        buckets = len(setup.model.layout.buckets)
        assert buckets == 4, "200 parameters of 10 elements, each at a multiple of 64"
        for _ in range(3):
            setup.step(list(range(200)), 1.0)
            assert [[len(tensors) for tensors in call] for call in setup.stepped] == [[buckets]]
        assert len(setup.optimizer.state) == buckets

    run_ranks(2, run)


HISTORIES = {
    "all": [(ALL, 1.0)] * 4,
    "one pauses": [(ALL, 1.0), (ALL[:5] + ALL[6:], 1.0), (ALL, 2.0), (ALL, 1.0)],
    "halves by turns": [(ALL[::2], 1.0), (ALL[1::2], 2.0)] * 3 + [(ALL, 1.0)],
}


@pytest.mark.parametrize(("history", "make"), [("all", adam), ("one pauses", nadam), ("halves by turns", adam)])
def test_params_missing_steps_have_state_of_torch(history: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """To the bit, counters included: the ranks' gradients are equal, so the mean of two is exact."""
    steps = HISTORIES[history]
    expected, expected_state = reference(Many(12), steps, make)

    def run(rank: int, group: ProcessGroup) -> dict[str, Any]:
        setup = Setup(group, Many(12), make, bucket_size=300)
        for used, factor in steps:
            setup.step(used, factor)
        for param, value in zip(setup.module.parameters(), expected, strict=True):
            assert torch.equal(param.detach(), value)
        return setup.optimizer.state_dict()

    state, _ = run_ranks(2, run)
    assert_same_state(state, expected_state)


def test_fused_kernel_gets_last_elements_as_torch_does() -> None:
    """Parameters of 20 elements, whose neighbours begin at the next multiple of 64."""
    expected, _ = reference(Many(200, 20), [(list(range(200)), 1.0)] * 4, fused)

    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, Many(200, 20), fused, bucket_size=4000)
        for _ in range(4):
            setup.step(list(range(200)), 1.0)
        assert all(map(torch.equal, setup.module.parameters(), expected))

    run_ranks(2, run)


def test_runs_are_divided_once_not_by_parameter() -> None:
    """Neighbours that pause together stay one tensor."""

    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, Many(12), momentum, bucket_size=10**6)
        others = [i for i in ALL if i not in (2, 3, 8, 9)]  # without two in the middle of each rank's six
        counts = []
        for used in (ALL, others, others, ALL, ALL):
            setup.step(used, 1.0)
            ((tensors,),) = setup.stepped
            counts.append(len(tensors))
        assert counts == [1, 3, 3, 3, 3], "divided for good, into what is before, between and after"

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.float32, {"foreach": True}), (torch.bfloat16, {"fused": True})],
    ids=str,
)
def test_large_tensor_is_stepped_in_blocks(dtype: torch.dtype, options: dict[str, bool]) -> None:
    numel = 2 * (3 * HOST_BLOCK_NUMEL + 128)

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1, **options)

    def run(rank: int, group: ProcessGroup) -> dict[str, Any]:
        setup = Setup(group, Many(1, numel, dtype), make)
        setup.step([0], 1.0)
        sizes = [tensor.numel() for tensor in setup.stepped[0][0]]
        blocks = [HOST_BLOCK_NUMEL] * 3 + [128]
        assert sizes == ([numel // 2] if options.get("fused") else blocks)
        for _ in range(2):
            setup.step([0], 1.0)
        return setup.optimizer.state_dict()

    state, _ = run_ranks(2, run)
    if dtype == torch.float32:
        _, expected = reference(Many(1, numel), [([0], 1.0)] * 3, make)
        assert_same_state(state, expected)


def test_param_in_several_runs_has_counters_after_load() -> None:
    numel = 2 * (3 * HOST_BLOCK_NUMEL + 128)
    _, expected = reference(Many(1, numel), [([0], 1.0)] * 3, adam)

    def run(rank: int, group: ProcessGroup) -> dict[str, Any]:
        setup = Setup(group, Many(1, numel), adam)
        setup.step([0], 1.0)
        setup.optimizer.load_state_dict(setup.optimizer.state_dict())
        for _ in range(2):
            setup.step([0], 1.0)
        return setup.optimizer.state_dict()

    assert_same_state(run_ranks(2, run)[0], expected)


# A step that raises, and whose error is caught: ranks launch the same collectives, wherever each of them failed.


class NoRootError(Exception):
    """A matrix has no root."""


class Fails(Simple):
    """As Lamb with momentum; it raises once it is armed, after its first parameter or before."""

    fails: str | None = None

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if self.fails == "before":
            raise NoRootError
        size = grad.norm() + 1e-3 if group["by_norm"] else 1.0
        param.sub_(state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(grad / size), alpha=group["lr"])
        if self.fails == "after":
            raise NoRootError


def train(
    group: ProcessGroup, rank: int, *, by_norm: bool, num_params: int, armed: set[int], fails: str, **options: Any
) -> list[Tensor]:
    """Eight layers; the optimizer has some of their weights; the third of five steps fails on some ranks."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 8), *(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 7))
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=SOME, **options), group)
    assert len(model.layout.buckets) > 1
    inner = Fails([layer.weight for layer in list(module)[-num_params:]], lr=0.02, by_norm=by_norm)
    optimizer = DistributedOptimizer(inner, model)
    for step in range(5):
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        inner.fails = fails if step == 2 and rank in armed else None
        with contextlib.suppress(NoRootError):
            optimizer.step()
        if step == 2:
            begun, done = optimizer.num_steps
            assert (done < begun) == (rank in armed and bool(optimizer._impl.runs))
            assert {id(param) for param in optimizer.param_groups[0]["params"]} <= set(map(id, module.parameters()))
    assert torch.stack([param.detach().isfinite().all() for param in module.parameters()]).all()
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize(
    ("by_norm", "gather", "num_params", "armed", "fails"),
    [
        pytest.param(False, False, 1, {0, 1, 2}, "before", id="False-False-1-{0, 1, 2}-before"),
        pytest.param(False, False, 8, {0, 1, 2}, "before", id="False-False-8-{0, 1, 2}-before"),
        pytest.param(True, True, 2, {1}, "after", id="True-True-2-{1}-after"),
    ],
)
def test_training_goes_on_and_ranks_are_equal(
    by_norm: bool, gather: Any, num_params: int, armed: set[int], fails: str
) -> None:
    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        return train(
            group, rank, by_norm=by_norm, num_params=num_params, armed=armed, fails=fails, overlap_param_gather=gather
        )

    first, *others = run_ranks(3, run)
    for other in others:
        assert all(map(torch.equal, first, other))
