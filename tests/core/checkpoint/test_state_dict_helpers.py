"""torch.distributed.checkpoint.state_dict with a sharded optimizer, and the option that is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.core.errors import DirectUseError
from tests.support.ranks import run_ranks


def trained(rank: int, group: ProcessGroup) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4), process_group=group)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    step(rank, model, optimizer)
    return model, optimizer


def step(rank: int, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
    optimizer.step()


def test_optimizer_state_by_helpers_continues_alike() -> None:
    """State of one model goes into another by the module's names, as torch's helpers have it, and both train on."""

    def run(rank: int, group: ProcessGroup) -> bool:
        model, optimizer = trained(rank, group)
        state = get_optimizer_state_dict(model.module, optimizer)
        other, other_optimizer = trained(rank, group)
        step(rank, other, other_optimizer)
        set_optimizer_state_dict(other.module, other_optimizer, state)
        other.module.load_state_dict(model.module.state_dict())
        step(rank, model, optimizer)
        step(rank, other, other_optimizer)
        same = torch.equal(model.module.weight, other.module.weight)
        model.close()
        other.close()
        return same

    assert run_ranks(2, run) == [True, True]


def test_flattened_optimizer_state_is_refused_by_name() -> None:
    def run(rank: int, group: ProcessGroup) -> str:
        model, optimizer = trained(rank, group)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = get_optimizer_state_dict(model.module, optimizer, options=options)
        with pytest.raises(DirectUseError) as raised:
            set_optimizer_state_dict(model.module, optimizer, state, options=options)
        model.close()
        return str(raised.value)

    for message in run_ranks(2, run):
        assert "flatten_optimizer_state_dict=True" in message
        assert "leave that option out" in message
