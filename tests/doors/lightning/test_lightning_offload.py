"""``offload_optimizer_states`` in a Trainer: its state is loaded past the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import strategy as lightnings
from torch.distributed import ProcessGroup

from megastrategy import MegatronDDPStrategy
from tests.support.given import Ours, adam, assert_same_file, trained
from tests.support.ranks import run_ranks


def test_lightning_moves_no_loaded_state_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does with every optimizer, one after the other: all of the state at once."""
    file = trained(2, adam, torch.float32, range(2))

    def refuse(*_: Any) -> None:
        raise AssertionError("state was moved")

    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, adam, torch.float32, offload_optimizer_states=True)
        strategy: Any = MegatronDDPStrategy(
            parallel_devices=[torch.device("cpu")] * 2, cluster_environment=Environment(rank)
        )
        strategy._engine, strategy._lightning_module = ours.model.engine, ours.module
        strategy.optimizers = [ours.optimizer]
        strategy.load_optimizer_state_dict({"state_dict": file["model"], "optimizer_states": [file["optimizer"]]})
        assert_same_file(ours.file()["optimizer"], file["optimizer"])
        ours.model.close()

    monkeypatch.setattr(lightnings, "_optimizer_to_device", refuse)
    run_ranks(2, run)


class Environment:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def local_rank(self) -> int:
        return self._rank
