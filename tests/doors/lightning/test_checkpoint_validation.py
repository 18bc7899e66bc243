"""A checkpoint that does not fit says what differs, and a load leaves no tensor in its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from megastrategy.core import CheckpointError
from megastrategy.fabric import MegatronDDPStrategy as FabricStrategy

from ..fits import AwkwardModule, fit_saving, loader, make_strategy, make_trainer
from ..rank_processes import Ranks


def two_groups(params: Any) -> torch.optim.Optimizer:
    first, *rest = params
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=1e-2)


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(fit_saving, folder)
    return folder / "step=7.ckpt"


def resume_other_groups(path: Path) -> str:
    trainer = make_trainer(make_strategy("megatron_ddp"))
    with pytest.raises(CheckpointError) as raised:
        trainer.fit(AwkwardModule(two_groups), loader(), ckpt_path=path)
    assert not any(optimizer.state for optimizer in trainer.optimizers)
    return str(raised.value)


def test_groups_of_another_optimizer_are_refused(ranks: Ranks, trained: Path) -> None:
    for message in ranks.run(resume_other_groups, trained):
        assert "parameter groups of" in message


def resume_foreign(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        make_trainer(make_strategy("megatron_ddp")).fit(AwkwardModule(), loader(), ckpt_path=path)
    return str(raised.value)


def test_a_trainer_says_what_is_wrong_with_a_file_on_every_rank(ranks: Ranks, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "short.ckpt").write_bytes(trained.read_bytes()[:1000])
    torch.save(AwkwardModule().state_dict(), tmp_path / "weights.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    problems = {"short": "is cut off", "weights": "is no checkpoint of a Trainer", "list": "got a list"}
    for name, problem in problems.items():
        path = tmp_path / f"{name}.ckpt"
        for message in ranks.run(resume_foreign, path):
            assert message.startswith(str(path))
            assert problem in message


def is_mapped(tensor: Tensor, path: Path) -> bool:
    """Whether the kernel knows the tensor's memory as a part of the file."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return line.endswith(str(path))
    raise AssertionError("no memory of this process")


def fabric_load(path: Path, sharded: bool) -> None:
    strategy = FabricStrategy(bucket_size=20, use_distributed_optimizer=sharded)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 5)).square().mean())
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    with pytest.raises(KeyError, match="has no 'scheduler'"):
        fabric.load(path, {"model": model, "scheduler": 0})
    rest = fabric.load(path, {"optimizer": optimizer})
    assert rest["step"] == 3
    states = [value for values in optimizer.state.values() for value in values.values()]
    assert states
    assert not any(is_mapped(tensor, path) for tensor in [*states, *rest["model"].values()])


@pytest.mark.parametrize("sharded", [True, False])
def test_fabric_leaves_nothing_in_the_file(ranks: Ranks, tmp_path: Path, sharded: bool) -> None:
    ranks.run(fabric_load, tmp_path / "last.ckpt", sharded)
