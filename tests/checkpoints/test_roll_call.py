"""``if rank == 0: torch.save(optimizer.state_dict())`` is right under torch DDP; here it must not hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.core.collectives import GlooCollectives
from megastrategy.core.errors import NotOnAllRanksError
from tests.support.models import two_layers
from tests.support.processes import run_processes


class Training:
    def __init__(self) -> None:
        self.model = DistributedDataParallel(two_layers().to(torch.bfloat16))
        self.optimizer = DistributedOptimizer(torch.optim.Adam(self.model.parameters()), self.model)
        self.train(1)

    def train(self, steps: int) -> None:
        for step in range(steps):
            data = torch.randn(4, 10, generator=torch.Generator().manual_seed(step + dist.get_rank())).bfloat16()
            self.model(data).square().sum().backward()
            self.optimizer.step()

    def finish(self) -> bool:
        """After a call that was not on all ranks everything goes on: the ranks stay equal, and saving works."""
        self.train(2)
        weights = parameters_to_vector(self.model.module.parameters()).detach()
        both = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(both, weights)
        state = self.optimizer.state_dict()["state"]
        return torch.equal(*both) and len(state) == (4 if dist.get_rank() == 0 else 0)


def call_alone(rank: int, call: Callable[[DistributedOptimizer], object], message: str) -> tuple[bool, float]:
    """Whether all went on well, and how long the call took."""
    training = Training()
    start = time.monotonic()
    if dist.get_rank() == rank:
        with pytest.raises(NotOnAllRanksError, match=message):
            call(training.optimizer)
    seconds = time.monotonic() - start
    return training.finish(), seconds


def state_dict(optimizer: DistributedOptimizer) -> object:
    return optimizer.state_dict()


def main_params(optimizer: DistributedOptimizer) -> object:
    return optimizer.main_params()


@pytest.mark.parametrize("call", [state_dict, main_params])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_calls_alone_is_told_where_the_other_waits(
    rank: int, call: Callable[[DistributedOptimizer], object]
) -> None:
    message = (
        rf"rank {rank}: {call.__name__}\(\) of a sharded optimizer .* has to be called on all of them, but rank "
        rf"{1 - rank} is elsewhere, waiting in [a-z-]+\. Call it on every rank, and save"
    )
    outcomes = run_processes(2, call_alone, rank, call, message)
    assert [went_well for went_well, _ in outcomes] == [True, True]
    assert outcomes[rank][1] < 20, "not the patience of a minute, nor the group's timeout"


def save_and_meet() -> tuple[bool, float]:
    """The idiom with a barrier of the user's own, in which nothing can be noticed: patience ends."""
    training = Training()
    roll_call = training.model.collectives._roll_call
    assert roll_call is not None
    assert dist.get_rank() != 0 or roll_call.patience == timedelta(seconds=60)
    assert dist.get_rank() == 0 or roll_call.patience > timedelta(seconds=50), "rank 0 may evaluate alone"
    if dist.get_rank() == 0:
        roll_call.patience = timedelta(seconds=1)
        with pytest.raises(NotOnAllRanksError, match=r"rank\(s\) \[1\] did not call it within 1 s"):
            training.optimizer.state_dict()
    dist.barrier()
    return training.finish(), 0.0


def test_a_rank_that_waits_in_vain_is_told_so_in_bounded_time() -> None:
    assert [went_well for went_well, _ in run_processes(2, save_and_meet)] == [True, True]


def call_different_things() -> bool:
    training = Training()
    calls = [state_dict, main_params]
    with pytest.raises(NotOnAllRanksError, match=r"rank 0 called state_dict\(\).*; rank 1 called main_params\(\)"):
        calls[dist.get_rank()](training.optimizer)
    return training.finish()


def test_ranks_that_call_different_things_are_told_so() -> None:
    assert run_processes(2, call_different_things) == [True, True]


def call_late() -> bool:
    """Rank 0 calls while rank 1 waits in a collective that is over for rank 0, and takes longer for rank 1."""
    training = Training()
    collectives = training.model.collectives
    assert isinstance(collectives, GlooCollectives)

    def run() -> None:
        collectives.group.allreduce([torch.ones(3)]).wait()
        time.sleep(2.5 * collectives.rank)

    handle = collectives._start("all-reduce", run)
    if collectives.rank == 1:
        handle.wait()
    return training.optimizer.state_dict() is not None and training.finish()


def test_being_late_is_no_error() -> None:
    assert run_processes(2, call_late) == [True, True]
