"""Optimizers whose ``step()`` does more than step: it counts, draws or communicates."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import OptimizerNotShardableError
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.programs import Trainee, assert_like_torch_ddp
from tests.support.ranks import run_ranks


class Ramp:
    """A schedule that falls after some calls."""

    def __init__(self, most: int) -> None:
        self.calls, self.most = 0, most

    def __call__(self) -> float:
        self.calls += 1
        return 1.0 if self.calls <= self.most else 0.1


class Warm(torch.optim.SGD):
    def __init__(self, params: Any, ramp: Callable[[], float]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.ramp = ramp

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 * self.ramp()
        return super().step(closure)


@pytest.mark.parametrize("make_ramp", [Ramp, lambda most: Ramp(most).__call__])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("size", [2, 1])
def test_a_schedule_of_its_own_falls_when_it_does_under_torch_ddp(make_ramp: Any, sharded: bool, size: int) -> None:
    """By calls of ``step()``, not by steps of copies and not by buckets."""

    def train(trainee: Trainee) -> list[float]:
        rates = []
        for _ in range(44):
            trainee.step()
            rates.append(trainee.optimizer.param_groups[0]["lr"])
        return rates

    assert_like_torch_ddp(train, lambda params: Warm(params, make_ramp(40)), size, sharded=sharded)


def test_random_numbers_of_a_program_go_on_as_under_torch_ddp() -> None:
    class Draws(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self.drawn = [torch.rand((), generator=self.generator).item(), self.of_python.random()]
            return super().step(closure)

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = Draws(params, lr=0.1)
        optimizer.generator, optimizer.of_python = torch.Generator().manual_seed(3), random.Random(3)
        return optimizer

    def train(trainee: Trainee) -> list[list[float]]:
        drawn = []
        for _ in range(3):
            trainee.step()
            drawn.append(trainee.inner.drawn)  # type: ignore[attr-defined]
        return drawn

    assert_like_torch_ddp(train, make)


# --- communication ---------------------------------------------------------------------------------------------------

Communicate = Callable[[ProcessGroup, Tensor], Any]


def send_and_receive(group: ProcessGroup, tensor: Tensor) -> None:
    if group.rank() == 0:
        group.send([tensor], 1, 0).wait()
    else:
        group.recv([tensor], 0, 0).wait()


COMMUNICATE: dict[str, Communicate] = {
    "allreduce": lambda group, tensor: group.allreduce([tensor]).wait(),
    "broadcast": lambda group, tensor: group.broadcast([tensor]).wait(),
    "allgather": lambda group, tensor: group.allgather([[tensor.clone(), tensor.clone()]], [tensor]).wait(),
    "barrier": lambda group, tensor: group.barrier().wait(),
    "send|recv": send_and_receive,
}


class Communicates(torch.optim.SGD):
    """Communicates in each step; it catches errors where ``catches``."""

    def __init__(self, params: Any, group: ProcessGroup, communicate: Communicate, catches: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.talk = lambda tensor: communicate(group, tensor)
        self.catches = catches

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                try:
                    self.talk(param.grad)
                except RuntimeError:
                    if not self.catches:
                        raise
        return super().step(closure)


def wrapped(group: ProcessGroup, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Any:
    module = two_layers()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100, **options), group)
    return module, model, DistributedOptimizer(make(module.parameters()), model)


@pytest.mark.parametrize("name", COMMUNICATE)
@pytest.mark.parametrize("catches", [False, True])
def test_a_step_that_communicates_is_refused_on_all_ranks_before_it_sends(name: str, catches: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> str:
        with pytest.raises(OptimizerNotShardableError) as caught:
            wrapped(group, lambda params: Communicates(params, group, COMMUNICATE[name], catches=catches))
        # Nothing is on its way: the next collective of the same group is this one on all ranks.
        total = torch.ones(3)
        group.allreduce([total]).wait()
        assert total.tolist() == [2.0] * 3
        return str(caught.value)

    for message in run_ranks(2, run):
        assert f"its step() communicates ({'' if '|' in name else name}" in message
        assert "use_distributed_optimizer=False" in message


def test_with_all_reduce_an_optimizer_may_communicate() -> None:
    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        make = lambda params: Communicates(params, group, COMMUNICATE["allreduce"])  # noqa: E731
        module, model, optimizer = wrapped(group, make, use_distributed_optimizer=False)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        return [param.detach().clone() for param in module.parameters()]

    ours = run_ranks(2, run)
    assert all(map(torch.equal, *ours))
