"""``timeout=`` is of every group: who asked for an hour is not ended after 30 minutes, nor kept waiting as long for one
minute."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ..accelerate_loops import Worlds, make_accelerator
from ..fits import loader
from ..rank_processes import Ranks

TIMEOUT = timedelta(seconds=51)
"""A timeout that no group has by default."""


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    """Processes whose default group is not there yet, since that one keeps the timeout of its first user."""
    pool = Ranks()
    yield pool
    pool.close()


def timeouts_s() -> list[float]:
    """The timeout of every group that this process is in, in seconds."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def fit(package: str, folder: Path) -> list[float]:
    pl = importlib.import_module(package)
    door = importlib.import_module(
        "megastrategy.lightning" if package != "pytorch_lightning" else "megastrategy." + package
    )

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    strategy = door.MegatronDDPStrategy(timeout=TIMEOUT, state_dict_type="sharded")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), loader())
    return timeouts_s()


@pytest.mark.sample(1)
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_every_group_of_a_fit_has_the_strategys_timeout(fresh: Ranks, tmp_path: Path, package: str) -> None:
    for found in fresh.run(fit, package, tmp_path):
        assert found == [TIMEOUT.total_seconds()] * 4, "all, the engine's, to meet, to save"


def with_fabric(folder: Path) -> list[float]:
    from lightning.fabric import Fabric

    from megastrategy.fabric import MegatronDDPStrategy

    strategy = MegatronDDPStrategy(timeout=TIMEOUT, state_dict_type="sharded")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = nn.Linear(5, 3)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    fabric.save(folder / "saved", {"model": model, "optimizer": optimizer})
    return timeouts_s()


def test_every_group_under_fabric_has_the_strategys_timeout(fresh: Ranks, tmp_path: Path) -> None:
    for found in fresh.run(with_fabric, tmp_path):
        assert found == [TIMEOUT.total_seconds()] * 3, "all, the engine's, to save"


def with_accelerate(folder: Path) -> list[float]:
    from accelerate import InitProcessGroupKwargs

    handlers = [InitProcessGroupKwargs(timeout=TIMEOUT)]
    accelerator = make_accelerator("megatron_ddp", {"state_dict_type": "sharded"}, kwargs_handlers=handlers)
    net = nn.Linear(5, 3)
    accelerator.prepare(net, torch.optim.Adam(net.parameters()))
    accelerator.save_state(str(folder / "saved"))
    return timeouts_s()


def test_every_group_under_accelerate_has_the_timeout_of_its_handler(tmp_path: Path) -> None:
    worlds = Worlds()
    try:
        for found in worlds.run(with_accelerate, tmp_path):
            assert found == [TIMEOUT.total_seconds()] * 3, "all, the engine's, to save"
    finally:
        worlds.close()
