"""Directories through Fabric and Accelerate, and in object stores: loaded whole, in any order of objects."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megastrategy import DistributedOptimizer
from megastrategy.core import CheckpointError, RemoteDirectory, is_directory_checkpoint
from megastrategy.tools.checkpoint_parts import read_file
from megastrategy.tools.conversion import consolidate, convert
from tests.doors.lightning.test_lightning_checkpoints import fit_and_save, resume
from tests.support.comparison import assert_equal, message
from tests.support.object_store import objects_in

from ..accelerate_loops import Worlds, adamw, make_accelerator
from ..fabric_loops import make_fabric
from ..fits import BATCHES_PER_EPOCH, assert_same_tensors, fit
from ..rank_processes import Ranks

SHARDED = {"state_dict_type": "sharded"}
EXTRA = {"empty": {}, 1: "one", "list": [1, {}], "pair": (1, 2)}


class Net(nn.Sequential):
    """Keeps something that is no tensor in its state_dict."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3))
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return EXTRA

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def main_params_after_loading(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rank 0's main params, as they were saved and after a load with the optimizer before the model."""
    fabric = make_fabric("megatron_ddp", SHARDED)
    found = []
    for seed in (0, 1):
        net = Net(seed).bfloat16()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        objects = dict(zip(("model", "optimizer"), fabric.setup(net, optimizer), strict=True))
        if seed == 0:
            for _ in range(5):
                fabric.backward(objects["model"](torch.randn(4, 5).bfloat16()).square().mean())
                objects["optimizer"].step()
                objects["optimizer"].zero_grad()
            fabric.save(folder / "checkpoint", objects)
        else:
            fabric.load(folder / "checkpoint", {key: objects[key] for key in ("optimizer", "model")})
        distributed = fabric.strategy._distributed(optimizer)
        assert isinstance(distributed, DistributedOptimizer)
        found.append(dict(distributed.main_params()))
    return found[0], found[1]


def test_main_params_are_loaded_in_whatever_order(ranks: Ranks, tmp_path: Path) -> None:
    """The weights are their rounding, and would replace them if they came later."""
    (saved, loaded), _ = ranks.run(main_params_after_loading, tmp_path)
    assert len(saved) == 4
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    assert_equal(loaded, saved)


# --- what is no tensor -----------------------------------------------------------------------------------------------


def extra_through_fabric(folder: Path) -> list[Any]:
    """From a directory, and from the file and the directory that the tools make of it."""
    fabric = make_fabric("megatron_ddp", SHARDED)
    net = Net(0)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.save(folder / "directory", {"model": model, "optimizer": optimizer, "step": 1})
    if fabric.global_rank == 0:
        consolidate(folder / "directory", folder / "file")
        parts = read_file(folder / "file")
        names = {"optimizer": [[name for name, _ in net.named_parameters()]]}
        convert(parts, names, folder / "converted")
    fabric.barrier()
    found = []
    for name in ("directory", "file", "converted"):
        net.extra = None
        remainder = fabric.load(folder / name, {"model": model})
        assert set(remainder) == {"optimizer", "step"}, name
        found.append(net.extra)
    return found


def test_extra_state_passes_fabric_and_the_tools(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(extra_through_fabric, tmp_path):
        assert found == [EXTRA] * 3


def extra_through_accelerate(folder: Path) -> Any:
    accelerator = make_accelerator("megatron_ddp", SHARDED)
    net = Net(0)
    accelerator.prepare(net, adamw(net.parameters()))
    accelerator.save_state(str(folder))
    accelerator.load_state(str(folder))
    return net.extra


def test_extra_state_passes_accelerate(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(extra_through_accelerate, tmp_path / "saved") == [EXTRA] * 2


# --- all or nothing --------------------------------------------------------------------------------------------------


def load_with_an_optimizer_that_does_not_fit(folder: Path) -> str:
    """The second optimizer has another number of groups than the saved one."""
    accelerator = make_accelerator("megatron_ddp", SHARDED)

    def prepare(seed: int, *, split: bool) -> nn.Module:
        net = Net(seed)
        halves = [{"params": net[2].weight}, {"params": net[2].bias}] if split else net[2].parameters()
        accelerator.prepare(net, adamw(net[0].parameters()), adamw(halves))
        return net

    prepare(0, split=False)
    accelerator.save_state(str(folder))
    accelerator.free_memory()
    net = prepare(1, split=True)
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    text = message(CheckpointError, lambda: accelerator.load_state(str(folder)))
    assert_equal({name: param.detach() for name, param in net.named_parameters()}, before)
    return text


def test_optimizer_that_does_not_fit_changes_nothing(worlds: Worlds, tmp_path: Path) -> None:
    for text in worlds.run(load_with_an_optimizer_that_does_not_fit, tmp_path / "saved"):
        assert "group" in text


# --- object stores ---------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder that has nothing in it yet."""
    return f"objects://{tmp_path}/store/run"


def test_run_resumes_from_a_store(ranks: Ranks, url: str) -> None:
    """Losses and weights to the bit."""
    options = {"strategy_options": SHARDED}
    whole = ranks.run(fit_and_save, "megatron_ddp", url, every=BATCHES_PER_EPOCH, **options)
    place = RemoteDirectory(f"{url}/step={BATCHES_PER_EPOCH}.ckpt")
    assert is_directory_checkpoint(place)
    resumed = ranks.run(resume, "megatron_ddp", place.url, **options)
    for mine, expected in zip(resumed, whole, strict=True):
        assert mine.losses == expected.losses[BATCHES_PER_EPOCH:]
        assert_same_tensors(mine.weights, expected.weights)


class CountsComplete(pl.Callback):
    """How many complete checkpoints there are at the start of each batch."""

    def __init__(self, url: str) -> None:
        self.url, self.counts = url, list[int]()

    def on_train_batch_start(self, *_: Any) -> None:
        names = RemoteDirectory(self.url).file_system().find(self.url)
        self.counts.append(sum(name.endswith("/.metadata") for name in names))


def fit_saving_slowly(url: str) -> list[int]:
    """In the background, where a save takes longer than a batch."""
    write_data, counter = FileSystemWriter.write_data, CountsComplete(url)

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(0.2)
        return write_data(*arguments)

    FileSystemWriter.write_data = write_slowly  # type: ignore[method-assign]
    try:
        saver = ModelCheckpoint(url, save_top_k=1, every_n_train_steps=1, filename="{step}")
        options = {"strategy_options": {"state_dict_type": "sharded"}, "plugins": [AsyncCheckpointIO()]}
        fit("megatron_ddp", callbacks=[saver, counter], enable_checkpointing=True, **options)
    finally:
        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    return counter.counts


@pytest.mark.nightly
def test_complete_checkpoint_is_there_at_any_time(ranks: Ranks, url: str) -> None:
    """ModelCheckpoint removes the old one as soon as it has asked for the new one."""
    for counts in ranks.run(fit_saving_slowly, url):
        assert set(counts[3:]) <= {1, 2}, counts
    assert [name.count("__") for name in sorted(objects_in(url))].count(1) == 2, "one is left, of two parts"


def resume_from_nothing(url: str) -> list[str]:
    kinds = {"last.ckpt": CheckpointError, "other.ckpt": FileNotFoundError}
    return [message(kind, lambda name=name: resume("megatron_ddp", f"{url}/{name}")) for name, kind in kinds.items()]


def test_what_is_not_complete_is_refused_by_name(ranks: Ranks, url: str) -> None:
    place = RemoteDirectory(f"{url}/last.ckpt")
    part = place.object("a1b2c3d4__0_0.distcp")
    place.file_system().pipe_file(part, b"left by a save that was cut off")
    for incomplete, missing in ranks.run(resume_from_nothing, url):
        assert incomplete.startswith(f"{place} is no complete sharded checkpoint")
        assert "other.ckpt" in missing


def through_fabric(place: str) -> None:
    """Three steps, a save, three steps; then the last three again, from the directory."""
    fabric = make_fabric("megatron_ddp", SHARDED)
    finals = []
    for first in (0, 3):
        net = Net(first)
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if first:
            fabric.load(place, state)
            assert (state["step"], net.extra) == (3, EXTRA)
        for step in range(first, 6):
            data = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + fabric.global_rank))
            fabric.backward(model(data).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if (first, step) == (0, 2):
                without_bias = {"model": lambda name, value: name != "2.bias"}
                fabric.save(f"{place}-partial", {**state, "step": 3}, filter=without_bias)
                fabric.save(place, {**state, "step": 3})
        finals.append([param.detach().clone() for param in net.parameters()])
    for mine, expected in zip(*finals, strict=True):
        assert torch.equal(mine, expected)
    assert set(fabric.load(place)) == {"model", "optimizer", "step"}
    with pytest.raises((RuntimeError, KeyError), match=r"2\.bias"):
        fabric.load(f"{place}-partial", state)
    assert fabric.load(f"{place}-partial", state, strict=False) == {}
    assert torch.equal(net[2].bias, finals[1][3]), "left out by the filter"
    with pytest.raises(TypeError, match="takes no storage_options"):
        fabric.strategy.save_checkpoint(place, {}, storage_options={})


@pytest.mark.parametrize("scheme", ["objects://", ""])
def test_fabric_resumes_from_a_directory(ranks: Ranks, tmp_path: Path, scheme: str) -> None:
    ranks.run(through_fabric, f"{scheme}{tmp_path}/store/checkpoint")
