"""``if rank == 0: torch.save(optimizer.state_dict())`` is right under torch DDP; here it is either, or says why not."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.utils._pytree import tree_leaves

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.core.collectives import GlooCollectives
from megastrategy.core.errors import NotOnAllRanksError
from tests.support.models import two_layers
from tests.support.optimizers import Shampoo
from tests.support.processes import run_processes


class Training:
    def __init__(self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, *, frozen: bool = False) -> None:
        module = two_layers().to(torch.bfloat16)
        module[0].requires_grad_(not frozen)
        self.model = DistributedDataParallel(module)
        self.optimizer = DistributedOptimizer(kind(self.model.parameters()), self.model)
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


def assert_equal(actual: Any, expected: Any) -> None:
    """Of states and main params, to the bit."""
    assert pickle.dumps(actual.get("param_groups")) == pickle.dumps(expected.get("param_groups"))
    tensors, wanted = (tree_leaves({**state, "param_groups": None}) for state in (actual, expected))
    assert len(tensors) == len(wanted)
    for one, other in zip(tensors, wanted, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def state_dict(optimizer: DistributedOptimizer) -> object:
    return optimizer.state_dict()


def main_params(optimizer: DistributedOptimizer) -> object:
    return optimizer.main_params()


MEANWHILE = ["backward", "barrier", "late", "no_sync"]


def call_on_rank_zero(kind: Any, call: Callable[[DistributedOptimizer], Any]) -> list[str]:
    """The cases in which rank 0 alone gets what all together get, and all goes on well after that.

    A case is where the other ranks are meanwhile: in the next backward, in a barrier that nothing can look into, late
    (they call it, too), or accumulating.
    """
    went_well = []
    for then in MEANWHILE:
        training = Training(kind)
        expected = call(training.optimizer)
        if dist.get_rank() == 0:
            assert_equal(call(training.optimizer), expected)
            assert_equal(call(training.optimizer), expected)
        elif then == "late":
            time.sleep(1.5)  # longer than rank 0's grace
            assert_equal(call(training.optimizer), expected)
            assert_equal(call(training.optimizer), expected)
        elif then == "no_sync":
            with training.model.no_sync():
                training.train(0, backwards=3)
        if then == "barrier":
            dist.barrier()
        if then == "no_sync" and dist.get_rank() == 0:
            with training.model.no_sync():
                training.train(0, backwards=3)
        went_well += [then] if training.finish() else []
    return went_well


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", [state_dict, main_params])
@pytest.mark.parametrize("kind", [torch.optim.Adam, Shampoo])
def test_rank_zero_alone_gets_what_all_get(kind: Any, call: Any) -> None:
    """Shards, and whole parameters with lists of tensors."""
    assert run_processes(3, call_on_rank_zero, kind, call) == [MEANWHILE] * 3


def call_before_a_joined_layer_is_stepped(kind: Any) -> bool:
    """No rank has shards of it; rank 0 has all of its state."""
    before = Training(kind)
    saved: list[Any] = [(before.optimizer.state_dict(), before.optimizer.main_params())]
    dist.broadcast_object_list(saved)
    training = Training(kind, frozen=True)
    training.optimizer.load_state_dict(saved[0][0])
    training.optimizer.load_main_params(saved[0][1])
    training.model.module[0].requires_grad_(True)
    with training.model.no_sync():
        training.train(0, backwards=1)
    training.optimizer.zero_grad()
    if dist.get_rank() == 0:
        assert_equal(training.optimizer.state_dict(), saved[0][0])
        main_params = training.optimizer.main_params()
        assert_equal({name: main_params[name] for name in saved[0][1]}, saved[0][1])
    dist.barrier()
    return training.finish()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [torch.optim.Adam, Shampoo])
def test_rank_zero_alone_has_the_state_of_what_has_joined(kind: Any) -> None:
    assert run_processes(2, call_before_a_joined_layer_is_stepped, kind) == [True] * 2


def call_on_rank_one() -> list[float]:
    """It would get nothing, and save that."""
    seconds = []
    for call in (state_dict, main_params):
        training = Training()
        message = (
            rf"rank 1: {call.__name__}\(\) of a sharded optimizer .* has to be called on all of them, but rank "
            r"0 is elsewhere, waiting in [a-z-]+\. Call it on every rank, and save"
        )
        start = time.monotonic()
        if dist.get_rank() == 1:
            with pytest.raises(NotOnAllRanksError, match=message):
                call(training.optimizer)
        seconds.append(time.monotonic() - start)
        assert training.finish()
    return seconds


def test_another_rank_that_calls_alone_is_told_where_rank_zero_waits() -> None:
    seconds = run_processes(2, call_on_rank_one)[1]
    assert max(seconds) < 20, "not the patience of a minute, nor the group's timeout"


def call_before_the_step() -> bool:
    """Rank 0 has done its part of the reduction, so that the others step meanwhile."""
    training = Training()
    training.train(0, backwards=1)
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(NotOnAllRanksError, match=r"rank 1 cannot hand its part over: it has begun its step 2, and"):
            training.optimizer.state_dict()
        assert time.monotonic() - start < 5
    training.optimizer.step()
    return training.finish()


def load_meanwhile() -> bool:
    """Rank 1 is about to load another state when rank 0 asks for the one before: it loads with rank 0 only."""
    training = Training()
    before = training.optimizer.state_dict()
    if dist.get_rank() == 0:
        assert_equal(training.optimizer.state_dict(), before)
    training.optimizer.load_state_dict({**before, "state": {}})
    assert not training.optimizer.state
    return training.finish()


def wait_for_rank_zero() -> bool:
    """Rank 1 calls alone while rank 0 is in a barrier of the user's: patience ends."""
    training = Training()
    roll_call = training.model.engine.collectives.roll_call
    assert roll_call is not None
    assert dist.get_rank() != 0 or roll_call.patience == timedelta(seconds=60)
    assert dist.get_rank() == 0 or roll_call.patience > timedelta(seconds=50), "rank 0 may evaluate alone"
    if dist.get_rank() == 1:
        roll_call.patience = timedelta(seconds=1)
        with pytest.raises(NotOnAllRanksError, match=r"rank\(s\) \[0\] did not call it within 1 s"):
            training.optimizer.state_dict()
    dist.barrier()
    return training.finish()


def meet_on_rank_zero() -> bool:
    """What needs all ranks, as a directory does; rank 1 is in the next backward."""
    training = Training()
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(NotOnAllRanksError, match=r"but rank 1 is elsewhere, in the [a-z-]+ of a later step"):
            training.model.engine.collectives.require_all_ranks("saving")
        assert time.monotonic() - start < 5
    return training.finish()


def call_different_things() -> bool:
    """Rank 0 needs nobody; rank 1 learns that rank 0 went on."""
    training = Training()
    if dist.get_rank() == 0:
        assert len(training.optimizer.state_dict()["state"]) == 4
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


CASES = [call_before_the_step, load_meanwhile, wait_for_rank_zero, meet_on_rank_zero, call_different_things, call_late]


def test_what_cannot_be_gathered_is_refused_and_all_goes_on() -> None:
    """Between backward and step, after another state was loaded, where all have to come; and being late is no error."""
    for outcome in run_processes(2, cases):
        assert outcome == {case.__name__: True for case in CASES}
