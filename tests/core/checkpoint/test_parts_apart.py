"""Ranks that have no folder in common write their parts apart, and the union of their folders is the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import CheckpointError, OpenDirectory, host_collectives
from tests.support.processes import run_processes


def write(folder: str, *, in_the_way: bool = False) -> tuple[dict[str, torch.Tensor], str]:
    """The model and the first moments as in a whole save, and the exception."""
    torch.manual_seed(0)
    net = nn.Linear(7, 5)
    model = DistributedDataParallel(net)
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters()), model)
    for _ in range(3):
        model(torch.ones(2, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rank = torch.distributed.get_rank()
    path = Path(folder) / f"rank {rank}" / "checkpoint"
    if in_the_way and rank == 1:
        path.mkdir(parents=True)
        (path / "notes").write_text("of the user")
    state = {"model": net.state_dict(), "optimizer": optimizer.sharded_state_dict()}
    said = ""
    try:
        save_directory(state, {"step": 3}, path, host_collectives(), is_apart=True)
    except CheckpointError as error:
        said = str(error)
    names = dict(enumerate(name for name, _ in net.named_parameters()))
    whole = {f"moment {names[index]}": values["exp_avg"] for index, values in optimizer.state_dict()["state"].items()}
    return {**whole, **net.state_dict()}, said


def test_union_of_rank_folders_is_whole(tmp_path: Path) -> None:
    (whole, said), (_, said_there) = run_processes(2, write, str(tmp_path))
    assert said == said_there == ""
    parts = [{path.name for path in (tmp_path / f"rank {rank}" / "checkpoint").iterdir()} for rank in range(2)]
    assert parts == [{"__0_0.distcp", ".metadata", "meta.pt"}, {"__1_0.distcp"}]
    assert [len(list((tmp_path / f"rank {rank}").iterdir())) for rank in range(2)] == [1, 1], "nothing is left beside"
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        OpenDirectory(tmp_path / "rank 0" / "checkpoint").read("optimizer")
    for rank in range(2):
        shutil.copytree(tmp_path / f"rank {rank}" / "checkpoint", tmp_path / "union", dirs_exist_ok=True)
    moments = OpenDirectory(tmp_path / "union").read("optimizer")["state"]
    read = {f"moment {name}": values["exp_avg"] for name, values in moments.items()}
    read |= OpenDirectory(tmp_path / "union").read("model")
    assert read.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(read[name], value, rtol=0, atol=0)


def test_a_rank_that_cannot_write_is_named_by_all(tmp_path: Path) -> None:
    outcomes = run_processes(2, write_where_something_is, str(tmp_path))
    for _, said in outcomes:
        assert "rank 1: IsADirectoryError" in said
    assert (tmp_path / "rank 1" / "checkpoint" / "notes").read_text() == "of the user"
    assert not (tmp_path / "rank 0" / "checkpoint").exists()


def write_where_something_is(folder: str) -> tuple[dict[str, torch.Tensor], str]:
    return write(folder, in_the_way=True)
