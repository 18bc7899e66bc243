"""``if rank == 0: torch.save(optimizer.state_dict())`` is right under torch DDP; here it raises, with the way out."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup
from torch.nn.utils import parameters_to_vector

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.core.collectives import GlooCollectives
from megastrategy.core.collectives.rank_check import RankCheck
from megastrategy.core.errors import CollectiveError, NotOnAllRanksError
from tests.support.models import two_layers
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks


class Training:
    def __init__(self) -> None:
        module = two_layers().to(torch.bfloat16)
        self.model = DistributedDataParallel(module)
        self.optimizer = DistributedOptimizer(torch.optim.Adam(self.model.parameters()), self.model)
        self.train(1)

    def train(self, steps: int, backwards: int = 0) -> None:
        for step in range(steps + backwards):
            data = torch.randn(4, 10, generator=torch.Generator().manual_seed(step + dist.get_rank())).bfloat16()
            self.model(data).square().sum().backward()
            if step < steps:
                self.optimizer.step()

    def finish(self) -> bool:
        """After a call that was not on all ranks everything goes on: the ranks stay equal, and saving works."""
        self.train(2)
        weights = parameters_to_vector(self.model.module.parameters()).detach()
        every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(every, weights)
        state = self.optimizer.state_dict()["state"]
        return all(torch.equal(every[0], other) for other in every) and len(state) == (4 if dist.get_rank() == 0 else 0)


def state_dict(optimizer: DistributedOptimizer) -> object:
    return optimizer.state_dict()


def main_params(optimizer: DistributedOptimizer) -> object:
    return optimizer.main_params()


ELSEWHERE = {
    0: r"rank [12] is elsewhere, waiting in [a-z-]+\. Call it on every rank, and save",
    1: r"rank 0 is elsewhere, waiting in [a-z-]+\. Call it on every rank, and save",
}
"""By the rank that calls without the others; rank 1 would get nothing, and save that."""


def call_on_one_rank(caller: int) -> list[float]:
    """Returns how long the rank took to say so, for both calls; the other ranks go on."""
    seconds = []
    for call in (state_dict, main_params):
        training = Training()
        message = (
            rf"rank {caller}: {call.__name__}\(\) of a sharded optimizer .* has to be called on all of them, "
            r"after the same number of batches, but " + ELSEWHERE[caller]
        )
        start = time.monotonic()
        if dist.get_rank() == caller:
            with pytest.raises(NotOnAllRanksError, match=message):
                call(training.optimizer)
        seconds.append(time.monotonic() - start)
        assert training.finish()
    return seconds


@pytest.mark.parametrize(("caller", "size"), [(0, 3), (1, 2)])
def test_call_on_one_rank_says_where_others_are(caller: int, size: int) -> None:
    """On the CPU as on a GPU, and training goes on."""
    seconds = run_processes(size, call_on_one_rank, caller)[caller]
    assert max(seconds) < 30, "not the patience of a minute, nor the group's timeout"


def load_meanwhile() -> bool:
    """Rank 1 is about to load another state when rank 0 asks for the one before: it loads with rank 0 only."""
    training = Training()
    before = training.optimizer.state_dict()
    if dist.get_rank() == 0:
        with pytest.raises(NotOnAllRanksError, match="rank 1 is elsewhere, in loading the"):
            training.optimizer.state_dict()
    training.optimizer.load_state_dict({**before, "state": {}})
    assert len(training.optimizer.state) == 0
    return training.finish()


def call_for_two_optimizers() -> bool:
    """Each rank asks for the state of another optimizer: neither gets a mixture."""
    module = two_layers()
    model = DistributedDataParallel(module)
    kinds = torch.optim.Adam, torch.optim.SGD
    optimizers = [
        DistributedOptimizer(kind(layer.parameters(), lr=0.1), model)
        for kind, layer in zip(kinds, (module[0], module[-1]), strict=True)
    ]
    rank = dist.get_rank()
    with pytest.raises(NotOnAllRanksError, match=[r"rank 1 is .*\(number 2\)", r"\(number 2\).*rank 0 is"][rank]):
        optimizers[rank].state_dict()
    model(torch.ones(1, 10)).sum().backward()  # in which rank 1 finds rank 0
    return all(optimizer.state_dict() is not None for optimizer in optimizers)


def wait_for_rank_zero() -> bool:
    """Rank 1 calls alone while rank 0 is in a barrier of the user's: patience ends."""
    training = Training()
    rank_check = training.model.engine.collectives.rank_check
    assert rank_check is not None
    assert dist.get_rank() != 0 or rank_check.patience == timedelta(seconds=60)
    assert dist.get_rank() == 0 or rank_check.patience > timedelta(seconds=50), "rank 0 may evaluate alone"
    if dist.get_rank() == 1:
        rank_check.patience = timedelta(seconds=1)
        with pytest.raises(NotOnAllRanksError, match=r"rank\(s\) \[0\] did not call it within 1 s"):
            training.optimizer.state_dict()
    dist.barrier()
    return training.finish()


def call_different_things() -> bool:
    """Either rank learns that the other is elsewhere."""
    training = Training()
    if dist.get_rank() == 0:
        with pytest.raises(NotOnAllRanksError, match=r"rank 1 is elsewhere, in main_params\(\) of a sharded optimizer"):
            training.optimizer.state_dict()
    else:
        with pytest.raises(NotOnAllRanksError, match=r"main_params\(\).*rank 0 is elsewhere"):
            training.optimizer.main_params()
    return training.finish()


def call_late() -> bool:
    """Rank 0 calls while rank 1 waits in a collective that is over for rank 0, and takes longer for rank 1."""
    training = Training()
    collectives = training.model.engine.collectives
    assert isinstance(collectives, GlooCollectives)

    def run() -> None:
        collectives.group.allreduce([torch.ones(3)]).wait()
        time.sleep(2.5 * collectives.rank)

    handle = collectives._start("all-reduce", run)
    if collectives.rank == 1:
        handle.wait()
    return training.optimizer.state_dict() is not None and training.finish()


def cases() -> dict[str, Any]:
    """One after the other in the same processes."""
    return {case.__name__: case() for case in CASES}


CASES = [
    load_meanwhile,
    wait_for_rank_zero,
    call_different_things,
    call_for_two_optimizers,
    call_late,
]


def test_call_on_some_ranks_is_refused() -> None:
    """While another state is loaded, of different optimizers; and being late is no error."""
    for outcome in run_processes(2, cases):
        assert outcome == {case.__name__: True for case in CASES}


# Before a rank check, a rank waits for its started collectives: that wait is watched, and answers other ranks.

TIMEOUT_S = 30.0


def rank_check(group: ProcessGroup) -> RankCheck:
    store = PrefixStore("check", group.get_group_store())
    return RankCheck(store, group.rank(), group.size(), timedelta(seconds=TIMEOUT_S))


def test_watchdog_ends_wait_before_rank_check() -> None:
    """A peer that raised and lives takes no part in the collective, and gloo would wait until the timeout."""
    is_over = threading.Event()

    def run(rank: int, group: ProcessGroup) -> float:
        collectives = GlooCollectives(group, rank_check(group))
        start = time.monotonic()
        if rank == 0:
            collectives.watchdog = lambda what, number: f"{what} {number} will not end"
            collectives.all_reduce(torch.ones(4), 1.0)  # as a backward leaves it: started, and waited for later
            try:
                with pytest.raises(CollectiveError, match="given up: all-reduce 1 will not end"):
                    collectives.require_all_ranks("state_dict()")
            finally:
                is_over.set()
        else:
            is_over.wait(2 * TIMEOUT_S)
        seconds = time.monotonic() - start
        if rank == 1:  # else rank 0's thread stays in there, and ends this process badly when that ends
            collectives.all_reduce(torch.ones(4), 1.0).wait()
        return seconds

    assert max(run_ranks(2, run)) < TIMEOUT_S / 2
