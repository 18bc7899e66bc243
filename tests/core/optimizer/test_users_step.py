"""The user's optimizer runs its ``step`` and ``zero_grad`` as under torch DDP: every argument arrives, an overridden
method is called, and if nothing is sharded only the user calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import DirectUseError, OptimizerNotShardableError
from tests.support.gradients import batch
from tests.support.kept_lists import Notes
from tests.support.models import two_layers
from tests.support.optimizers import NeedsClosure, stepped
from tests.support.programs import Trainee, assert_like_torch_ddp
from tests.support.ranks import run_ranks

both_modes = pytest.mark.parametrize("sharded", [True, False], ids=["reduce-scatter", "all-reduce"])


class Users(torch.optim.SGD):
    """Notes its calls, and takes more than torch's."""

    calls: Notes

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0, *, clip: bool = False, extra: Any = None) -> Any:  # type: ignore[override]
        self.calls.append("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if clip:
            scale = scale / torch.stack([param.grad.norm() for param in stepped(self) if param.grad is not None]).norm()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * scale, alpha=group["lr"])
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("zero_grad")
        super().zero_grad(*args, **kwargs)


def users(params: Any) -> Users:
    """Its class is the rank's, and so are its calls."""
    return type("Users", (Users,), {"calls": Notes()})(params, lr=0.05)


def backward(trainee: Trainee, step: int) -> Tensor:
    loss: Tensor = trainee.model(batch(trainee.rank, step)).square().mean()
    loss.backward()
    return loss.detach()


Script = Callable[[Trainee], None]


def assert_equal_to_ddp(script: Script, *, sharded: bool, size: int = 2, **options: Any) -> None:
    """Weights to the bit, and the calls where nothing is sharded."""

    def program(trainee: Trainee) -> list[str] | None:
        script(trainee)
        assert trainee.inner.calls
        return None if sharded and size > 1 else list(trainee.inner.calls)

    assert_like_torch_ddp(program, users, size, sharded=sharded, **options)


def with_everything(trainee: Trainee) -> None:
    """A loop that saves, resumes, and steps in every form."""
    for step in range(4):
        trainee.optimizer.zero_grad()
        backward(trainee, step)
        if step == 2:
            trainee.optimizer.load_state_dict(trainee.optimizer.state_dict())
        [trainee.optimizer.step, lambda: trainee.optimizer.step(None)][step % 2]()


@pytest.mark.parametrize(("size", "sharded"), [(1, True), (2, False), (2, True)])
def test_a_loop_steps_as_under_torch_ddp(size: int, sharded: bool) -> None:
    assert_equal_to_ddp(with_everything, sharded=sharded, size=size)


def in_every_form(trainee: Trainee) -> None:
    optimizer = trainee.optimizer

    def closure(step: int) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            return backward(trainee, step)

        return evaluate

    assert float(optimizer.step(closure(0))) > 0
    assert float(optimizer.step(closure=closure(1))) > 0
    closure(2)()
    optimizer.step(None)
    optimizer.step()


def with_arguments(trainee: Trainee) -> None:
    backward(trainee, 0)
    trainee.optimizer.step(lambda: backward(trainee, 1), 0.5)
    trainee.optimizer.step(lambda: backward(trainee, 2), scale=torch.tensor(0.25))
    trainee.optimizer.step(None, 3.0)
    trainee.optimizer.step(scale=0.125)


@pytest.mark.parametrize(("overlap", "sharded"), [(True, True), (False, False)])
def test_a_closure_is_called_in_every_form_of_step(overlap: bool, sharded: bool) -> None:
    assert_equal_to_ddp(in_every_form, sharded=sharded, overlap_param_gather=overlap)


def test_step_arguments_arrive_with_all_reduce() -> None:
    assert_equal_to_ddp(with_arguments, sharded=False)


def started(rank: int, group: ProcessGroup, make: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Trainee:
    """A model of that dtype and its optimizer, after a backward."""
    trainee = Trainee(rank, group, make, None)
    trainee.module = two_layers().to(dtype)
    trainee.model = DistributedDataParallel(trainee.module, DistributedDataParallelConfig(**options), group)
    trainee.optimizer = DistributedOptimizer(make(trainee.model.parameters()), trainee.model)
    backward(trainee, 0)
    return trainee


def test_step_arguments_over_shards_are_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        called: list[int] = []
        optimizer = started(rank, group, users).optimizer
        with pytest.raises(OptimizerNotShardableError, match=r"sharded Users accepts a closure.*=False"):
            optimizer.step(lambda: called.append(1), clip=True)
        optimizer.step()
        assert called == []

    run_ranks(2, run)


@both_modes
def test_an_overridden_zero_grad_is_called(sharded: bool) -> None:
    assert_equal_to_ddp(lambda trainee: trainee.step(3), sharded=sharded)


def test_zero_grad_keeping_state_is_refused() -> None:
    class Keeps(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for param in self.param_groups[0]["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
            super().zero_grad(set_to_none)

    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(DirectUseError, match="was looked up"):
            started(rank, group, Keeps).optimizer.zero_grad()
        started(rank, group, Keeps, use_distributed_optimizer=False).optimizer.zero_grad()

    run_ranks(2, run)


class KeepsParameters(torch.optim.SGD):
    """Steps what it was given when it was constructed, whatever is in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = list(self.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NeedsClosure, r"its step\(\) cannot be called without arguments \(missing .*'closure'"),
        (torch.optim.LBFGS, r"its step\(\) cannot be called without arguments"),
        (KeepsParameters, "its attribute 'own' holds the 16-bit weights themselves"),
    ],
)
def test_main_params_refuse_closure_optimizers(kind: Any, reason: str) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(OptimizerNotShardableError, match=rf"cannot step the fp32 main params.*{reason}"):
            started(rank, group, kind, torch.bfloat16, use_distributed_optimizer=False)

    run_ranks(1, run)
