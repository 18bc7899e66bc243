"""Optimizers whose ``step()`` does more than step: it counts, draws or communicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import OptimizerNotShardableError
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.ranks import run_ranks

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


@pytest.mark.parametrize(
    ("name", "catches"),
    [("allreduce", False), ("allgather", False), ("barrier", False), ("send|recv", False), ("broadcast", True)],
)
def test_communicating_step_is_refused(name: str, catches: bool) -> None:
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
