"""``sharding=``: the user says how a group is divided, for the optimizer or as an entry of a parameter group."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import OptimizerNotShardableError
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.optimizers import Simple
from tests.support.ranks import run_ranks


class Locked(Simple):
    """Element-wise; keeps a lock, which no copy of it can have, so that it cannot be tested."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.lock = threading.Lock()

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        with self.lock:
            state["momentum"] = state.get("momentum", 0) * 0.9 + grad
            param.sub_(state["momentum"], alpha=group["lr"])


def train(module: nn.Module, model: Any, optimizer: Any, rank: int) -> tuple[list[Tensor], Any]:
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in module.parameters()], optimizer.state_dict()["state"]


def groups_of(module: nn.Module, *entries: dict[str, Any]) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [{"params": params[:2], **entries[0]}, {"params": params[2:], **entries[1]}]


def wrap(module: nn.Module, group: ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100), group)


@pytest.mark.parametrize(
    ("argument", "entries", "num_whole"),
    [
        ("flat", [{}, {}], 0),
        ("whole", [{}, {}], 4),
        ("auto", [{"sharding": "whole"}, {"sharding": "flat"}], 2),
        ("flat", [{}, {"sharding": "whole"}], 2),
    ],
)
def test_groups_are_divided_as_the_user_says(argument: Any, entries: Any, num_whole: int) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours, theirs = two_layers(), two_layers()
        model = wrap(ours, group)
        with pytest.raises(OptimizerNotShardableError, match=r"'lock' cannot be copied.*sharding='flat'"):
            DistributedOptimizer(Locked(ours.parameters()), model)
        optimizer = DistributedOptimizer(Locked(groups_of(ours, *entries)), model, sharding=argument)
        weights, state = train(ours, model, optimizer, rank)
        expected, expected_state = train(
            theirs, TorchDDP(theirs, process_group=group), Locked(theirs.parameters()), rank
        )
        assert len(optimizer._impl.owners()) == num_whole
        assert all(map(torch.equal, weights, expected))
        for number, values in expected_state.items() if rank == 0 else ():
            assert torch.equal(state[number]["momentum"], values["momentum"])
        optimizer.param_groups[0]["lr"] = 0.05  # what the user said is not tested later either
        train(ours, model, optimizer, rank)
        model.close()

    run_ranks(2, run)


@pytest.mark.parametrize("size", [1, 2])
def test_an_unknown_word_is_refused(size: int) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = wrap(module, group)
        said = "sharding must be one of 'auto', 'flat', 'whole', got 'none'"
        for optimizer, argument in (
            (Locked(module.parameters()), "none"),
            (Locked(groups_of(module, {"sharding": "none"}, {})), "auto"),
        ):
            with pytest.raises(ValueError, match=said):
                DistributedOptimizer(optimizer, model, sharding=argument)  # type: ignore[arg-type]
        model.close()

    run_ranks(size, run)
