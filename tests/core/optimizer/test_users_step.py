"""The user's optimizer runs its ``step`` and ``zero_grad`` as under torch DDP: every argument arrives, an overridden
method is called, and if nothing is sharded only the user calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import DirectUseError, OptimizerNotShardableError
from tests.support.gradients import batch
from tests.support.kept_lists import Notes
from tests.support.models import two_layers
from tests.support.optimizers import NeedsClosure, stepped
from tests.support.ranks import run_ranks

Script = Callable[[Any, Any, int], None]
"""Trains (model, optimizer, rank)."""

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


def users() -> type[Users]:
    """For one rank: it has calls of its own."""
    return type("Users", (Users,), {"calls": Notes()})


def backward(model: Any, rank: int, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(batch(rank, step).to(dtype)).float().square().mean()
    loss.backward()
    return loss.detach()


def train_under_ddp(
    kind: type[torch.optim.Optimizer], script: Script, rank: int, group: ProcessGroup, dtype: torch.dtype
) -> nn.Module:
    module = two_layers().to(dtype)
    model = TorchDDP(module, process_group=group)
    script(model, kind(model.parameters(), lr=0.05), rank)
    return module


def train(
    kind: type[torch.optim.Optimizer],
    script: Script,
    rank: int,
    group: ProcessGroup,
    dtype: torch.dtype,
    **options: Any,
) -> nn.Module:
    module = two_layers().to(dtype)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100, **options), group)
    script(model, DistributedOptimizer(kind(model.parameters(), lr=0.05), model), rank)
    return module


def assert_equal_to_ddp(kind: Callable[[], type[Any]], script: Script, **options: Any) -> None:
    """Weights to the bit, and the calls where nothing is sharded."""

    def run(rank: int, group: ProcessGroup) -> None:
        theirs, ours = kind(), kind()
        expected = train_under_ddp(theirs, script, rank, group, torch.float32)
        module = train(ours, script, rank, group, torch.float32, **options)
        for param, other in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.equal(param, other)
        assert ours.calls
        if not options["use_distributed_optimizer"]:
            assert ours.calls == theirs.calls

    run_ranks(2, run)


def with_everything(model: Any, optimizer: Any, rank: int) -> None:
    """A loop that saves, resumes, and steps in every form."""
    for step in range(4):
        optimizer.zero_grad()
        backward(model, rank, step)
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        [optimizer.step, lambda: optimizer.step(None)][step % 2]()


@pytest.mark.parametrize(
    ("size", "sharded", "dtype"), [(1, True, torch.float32), (1, False, torch.bfloat16), (2, False, torch.float32)]
)
def test_unsharded_optimizer_is_stepped_by_user_only(size: int, sharded: bool, dtype: torch.dtype) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        theirs, ours = users(), users()
        train_under_ddp(theirs, with_everything, rank, group, dtype)
        train(ours, with_everything, rank, group, dtype, use_distributed_optimizer=sharded)
        assert ours.calls == theirs.calls == ["zero_grad", "step"] * 4

    run_ranks(size, run)


def in_every_form(model: Any, optimizer: Any, rank: int) -> None:
    def closure(step: int) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            return backward(model, rank, step)

        return evaluate

    assert float(optimizer.step(closure(0))) > 0
    assert float(optimizer.step(closure=closure(1))) > 0
    closure(2)()
    optimizer.step(None)
    optimizer.step()


def with_arguments(model: Any, optimizer: Any, rank: int) -> None:
    backward(model, rank, 0)
    optimizer.step(lambda: backward(model, rank, 1), 0.5)
    optimizer.step(lambda: backward(model, rank, 2), scale=torch.tensor(0.25))
    optimizer.step(None, 3.0)
    optimizer.step(scale=0.125)


@pytest.mark.parametrize(("overlap", "sharded"), [(True, True), (False, False)])
def test_a_closure_is_called_in_every_form_of_step(overlap: bool, sharded: bool) -> None:
    options = {"use_distributed_optimizer": sharded, "overlap_param_gather": overlap and sharded}
    assert_equal_to_ddp(users, in_every_form, **options)


def test_step_arguments_arrive_with_all_reduce() -> None:
    assert_equal_to_ddp(users, with_arguments, use_distributed_optimizer=False)


def test_step_arguments_over_shards_are_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        called: list[int] = []

        def script(model: Any, optimizer: Any, rank: int) -> None:
            backward(model, rank, 0)
            with pytest.raises(OptimizerNotShardableError, match=r"sharded Users accepts a closure.*=False"):
                optimizer.step(lambda: called.append(1), clip=True)
            optimizer.step()

        train(users(), script, rank, group, torch.float32)
        assert called == []

    run_ranks(2, run)


def with_zero_grads(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


@both_modes
def test_an_overridden_zero_grad_is_called(sharded: bool) -> None:
    assert_equal_to_ddp(users, with_zero_grads, use_distributed_optimizer=sharded)


def test_zero_grad_keeping_state_is_refused() -> None:
    class Keeps(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for param in self.param_groups[0]["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
            super().zero_grad(set_to_none)

    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(DirectUseError, match="was looked up"):
            train(Keeps, with_zero_grads, rank, group, torch.float32)
        train(Keeps, with_zero_grads, rank, group, torch.float32, use_distributed_optimizer=False)

    run_ranks(2, run)


class KeepsParameters(torch.optim.SGD):
    """Steps what it was given when it was constructed, whatever is in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
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
            train(kind, with_zero_grads, rank, group, torch.bfloat16, use_distributed_optimizer=False)

    run_ranks(1, run)
