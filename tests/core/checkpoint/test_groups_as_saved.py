"""An optimizer whose own ``state_dict`` has its groups otherwise than it keeps them: a checkpoint has them so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


class KeepsTensors(torch.optim.SGD):
    """Its learning rates are tensors, and numbers in a file, as Dion's are."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        for group in self.param_groups:
            group["lr"] = torch.tensor(lr, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        groups = [{**group, "lr": float(group["lr"]), "version": 2} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            assert group.pop("version") == 2
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)


@pytest.mark.parametrize("sharded", [True, False])
def test_groups_are_as_its_own_state_dict_has_them(sharded: bool) -> None:
    plain = two_layers()
    expected = KeepsTensors(plain.parameters()).state_dict()["param_groups"]

    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)

    def wrapped(group: ProcessGroup) -> tuple[DistributedDataParallel, DistributedOptimizer]:
        model = DistributedDataParallel(two_layers(), config, group)
        return model, DistributedOptimizer(KeepsTensors(model.parameters(), lr=0.1), model)

    def save(rank: int, group: ProcessGroup) -> tuple[Any, Any]:
        model, optimizer = wrapped(group)
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        return optimizer.state_dict(), optimizer.sharded_state_dict()["param_groups"]

    saved = run_ranks(2, save)
    for full, parts in saved:
        assert full["param_groups"] == expected
        assert [{**group, "params": expected[0]["params"]} for group in parts] == expected

    def load(rank: int, group: ProcessGroup) -> Any:
        _, optimizer = wrapped(group)
        optimizer.param_groups[0]["lr"] = torch.tensor(7.0)
        optimizer.load_state_dict(saved[0][0])
        return optimizer.param_groups[0]["lr"]

    assert run_ranks(2, load) == [torch.tensor(0.1, dtype=torch.float64)] * 2
