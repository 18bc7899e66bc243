"""State that is not element-wise goes from files into directories and back, as a fit would have written it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from megastrategy.core import CheckpointError, OpenDirectory
from megastrategy.fabric import MegatronDDPStrategy as FabricStrategy
from megastrategy.tools.checkpoint_parts import read_file
from megastrategy.tools.conversion import consolidate, convert
from megastrategy.tools.param_names import names_from
from tests.doors.lightning.test_lightning_checkpoints import assert_same_value
from tests.doors.rank_processes import Ranks
from tests.support.optimizers import InBlocks, KeepsNested, MatricesAndRest, Shampoo

from .test_conversion import assert_same_directories, load

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adafactor(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Keeps rows and columns of matrices, and all of vectors."""
    return torch.optim.Adafactor(params, lr=0.02)


def matrices_and_rest(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Steps one group whole and one as shards."""
    matrices = [param for param in params if param.dim() > 1]
    return MatricesAndRest([{"params": matrices, "by_row": True}, {"params": [p for p in params if p.dim() < 2]}])


def net_of(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def save_both_ways(folder: Path, make: Make, width: int, dtype: torch.dtype) -> None:
    for kind in ("sharded", "full"):
        strategy = FabricStrategy(bucket_size=100, state_dict_type=kind)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        net = net_of(width).to(dtype)
        model, optimizer = fabric.setup(net, make([*net.parameters()]))
        for step in range(2):
            fabric.backward(model(torch.full((4, 5), 1.0 + step, dtype=dtype)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(folder / kind, {"net": model, "optimizer": optimizer, "step": 2})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "width", "dtype"),
    [
        (adafactor, 13, torch.float32),
        (adafactor, 13, torch.bfloat16),
        (Shampoo, 13, torch.float32),
        (KeepsNested, 13, torch.float32),
        (InBlocks, 900, torch.float32),
        (matrices_and_rest, 13, torch.bfloat16),
    ],
)
def test_files_and_directories_are_made_of_each_other_as_ranks_write_them(
    ranks: Ranks, tmp_path: Path, make: Make, width: int, dtype: torch.dtype
) -> None:
    """Rows and columns, lists of factors, dictionaries, blocks with their largest, and shards beside whole ones."""
    ranks.run(save_both_ways, tmp_path, make, width, dtype)
    consolidate(tmp_path / "sharded", tmp_path / "file")
    assert_same_value(load(tmp_path / "file"), load(tmp_path / "full"), "checkpoint")
    convert(read_file(tmp_path / "full"), names_from(tmp_path / "sharded"), tmp_path / "directory")
    assert_same_directories(tmp_path / "directory", tmp_path / "sharded")


def saved_by_torch(path: Path, make: Make) -> dict[int, dict[str, Any]]:
    net = net_of(13)
    optimizer = make([*net.parameters()])
    net(torch.ones(4, 5)).square().mean().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return optimizer.state_dict()["state"]


def test_names_are_checked_by_the_state_that_is_element_wise(tmp_path: Path) -> None:
    """Adafactor's of vectors is; that of matrices has other shapes, and fits any of them."""
    state = saved_by_torch(tmp_path / "file", adafactor)
    right = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert state[0]["row_var"].shape != net_of(13)[0].weight.shape
    wrong = {"optimizer": [["0.weight", "2.bias", "2.weight", "0.bias"]]}
    with pytest.raises(CheckpointError, match=r"1 cannot be '2.bias' of shape \(3,\), since 'variance' has shape \(13"):
        convert(read_file(tmp_path / "file"), wrong, tmp_path / "directory")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    convert(read_file(tmp_path / "file"), {"optimizer": [right]}, tmp_path / "directory")
    saved = OpenDirectory(tmp_path / "directory").read("optimizer")["state"]
    for number, name in enumerate(right):
        for key, value in state[number].items():
            assert not isinstance(value, Tensor) or torch.equal(saved[name][key], value), (name, key)
