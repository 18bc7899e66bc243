"""Other people's readers find whole tensors by name in our directories, and we read FSDP2's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, host_collectives
from tests.support.models import awkward_model, two_layers
from tests.support.processes import run_processes
from tests.support.sharded_training import adamw, assert_same, save_after_three


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory that two ranks wrote, and what is in it."""
    path = tmp_path_factory.mktemp("written") / "checkpoint"
    return path, run_processes(2, save_after_three, path)[0]


def test_foreign_readers_find_whole_tensors(tmp_path: Path, written: tuple[Path, dict[str, Any]]) -> None:
    path, saved = written
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_same(dict(whole["model"]), dict(saved["weights"]), strides=False)  # which the format does not know
    plain = awkward_model()
    optimizer = adamw(plain.parameters())
    optimizer.load_state_dict(whole["optimizer"])  # torch's own takes names for numbers
    assert_same(optimizer.state_dict()["state"], saved["optimizer"]["state"], strides=False)
    names = {name for name, _ in plain.named_parameters()}
    assert {name for name, values in whole["optimizer"]["state"].items() if values} < names


def test_the_directory_holds_each_element_once(written: tuple[Path, dict[str, Any]]) -> None:
    path, _ = written
    metadata = dcp.FileSystemReader(path).read_metadata()
    nbytes = sum(info.length for info in metadata.storage_data.values())
    assert nbytes == sum(file.stat().st_size for file in path.glob("*.distcp")), "and nothing that is not listed"
    tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
    assert len(tensors) > 40
    for name, entry in tensors.items():
        assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size), name


def plain_model() -> nn.Sequential:
    return two_layers().append(nn.Linear(7, 3, bias=False))


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        data = torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def exchange_with_fsdp(folder: Path) -> None:
    """Three steps under one, saved as it saves, read by the other: the same weights and state, and so on from there."""
    ours = plain_model()
    engine = DistributedDataParallel(ours, DistributedDataParallelConfig(bucket_size=150))
    optimizer = DistributedOptimizer(torch.optim.AdamW(ours.parameters(), lr=1e-2), engine)
    train_plain(engine, optimizer, range(3))
    save_directory(
        {"model": ours.state_dict(), "optimizer": optimizer.sharded_state_dict()},
        {},
        folder / "ours",
        host_collectives(),
    )
    before = optimizer.state_dict()

    theirs = fully_shard(plain_model())
    other = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    weights, state = get_state_dict(theirs, other)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "ours")
    set_state_dict(theirs, other, model_state_dict=weights, optim_state_dict=state)
    for param, expected in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)
        assert other.state[param]["exp_avg"].full_tensor().any()
        assert other.state[param]["step"].item() == 3
    assert other.param_groups[0]["lr"] == 1e-2

    weights, state = get_state_dict(theirs, other)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "theirs")
    train_plain(engine, optimizer, range(3, 5))  # away from it
    ours.load_state_dict(OpenDirectory(folder / "theirs").read("model"))
    optimizer.load_sharded(folder / "theirs")
    after = optimizer.state_dict()
    assert_same(after["state"], before["state"])
    assert after["param_groups"][0]["lr"] == 1e-2


def test_fsdp2_reads_ours_and_we_read_fsdp2s(tmp_path: Path) -> None:
    run_processes(2, exchange_with_fsdp, tmp_path)
