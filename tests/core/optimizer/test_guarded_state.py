"""``optimizer.state`` of a sharded optimizer: looking up a Parameter raises, iterating over all of it does not."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import DirectUseError
from tests.core.data_path.test_reduced_grad import Net, loss_of
from tests.support.ranks import run_ranks


class Shrinks(torch.optim.SGD):
    @torch.no_grad()
    def shrink(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if "momentum_buffer" in self.state[param]:
                    self.state[param]["momentum_buffer"].mul_(0.5)


def forget(state: Any, param: Any) -> None:
    del state[param]


LOOK_UPS: dict[str, Callable[[Any, Any], object]] = {
    "in": lambda optimizer, param: param in optimizer.state,
    "[]": lambda optimizer, param: optimizer.state[param],
    "get": lambda optimizer, param: optimizer.state.get(param),
    "set": lambda optimizer, param: optimizer.state.__setitem__(param, {}),
    "del": lambda optimizer, param: forget(optimizer.state, param),
    "pop": lambda optimizer, param: optimizer.state.pop(param, None),
    "setdefault": lambda optimizer, param: optimizer.state.setdefault(param, {}),
    "a method called as a function of the class": lambda optimizer, param: Shrinks.shrink(optimizer),
}


def started(rank: int, group: ProcessGroup, **options: Any) -> tuple[Net, Any]:
    net = Net()
    net.idle.requires_grad_(False)
    model = DistributedDataParallel(net, DistributedDataParallelConfig(bucket_size=40, **options), group)
    optimizer = DistributedOptimizer(Shrinks(net.parameters(), lr=0.1, momentum=0.9), model)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
def test_state_lookup_by_param_is_refused(look_up: Callable[[Any, Any], object]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        net, optimizer = started(rank, group)
        with pytest.raises(DirectUseError, match=r"(?s)'first\.weight'.*state_dict\(\).*optimizer=False") as error:
            look_up(optimizer, net.first.weight)
        assert len(str(error.value)) <= 400

    run_ranks(2, run)


def test_whole_state_is_shown() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        net, optimizer = started(rank, group)
        state = optimizer.state
        assert net.idle.weight not in state
        assert state.get(net.idle.weight) is None
        assert state.pop("nothing", 3) == 3
        assert len(state) == len(list(state)) == len(optimizer.optimizer.state) > 0
        assert all(values["momentum_buffer"].any() for values in state.values())
        for values in state.values():
            values["momentum_buffer"].zero_()
        saved = optimizer.state_dict()["state"]
        assert rank or not any(values["momentum_buffer"].any() for values in saved.values())
        state["a note"] = 1
        assert optimizer.optimizer.state["a note"] == 1
        state.clear()
        assert not optimizer.optimizer.state

    run_ranks(2, run)


@pytest.mark.parametrize("loads", [True, False])
def test_state_truth_is_the_same_on_all_ranks(loads: bool) -> None:
    """torch's checkpoint helpers step an optimizer whose state is false, and a step is collective."""

    def run(rank: int, group: ProcessGroup) -> list[tuple[bool, int]]:
        saved: dict[str, Any] = {}
        found = []
        for _ in range(2 if loads else 1):
            net = nn.Linear(1, 1, bias=False)
            model = DistributedDataParallel(net, process_group=group)
            optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), model)
            assert not optimizer.state
            if saved:
                optimizer.load_state_dict(saved)
            else:
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            found.append(bool(optimizer.state))
            saved = optimizer.state_dict()
            found.append(bool(optimizer.state))
        return [(truth, len(optimizer.state)) for truth in found]

    first, second = run_ranks(2, run)
    assert [truth for truth, _ in first] == [truth for truth, _ in second] == [True] * len(first)
    assert second[0][1] == 0, "it steps nothing"


def test_with_an_all_reduce_it_is_the_optimizers_own() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        net, optimizer = started(rank, group, use_distributed_optimizer=False)
        assert isinstance(optimizer.state, collections.defaultdict)
        Shrinks.shrink(optimizer)
        assert "momentum_buffer" in optimizer.state[net.first.weight]

    run_ranks(2, run)
