"""``state_dict_type="sharded"``: directories that every rank writes its part of, and that everybody can read."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megastrategy import MegatronDDPStrategy
from megastrategy.core import CheckpointError, OpenDirectory, is_directory_checkpoint
from megastrategy.fabric import MegatronDDPStrategy as FabricStrategy
from tests.support.patience import HANG_S

from ..fits import BATCHES_PER_EPOCH, AwkwardModule, Fit, assert_same_tensors, fit, loader, make_strategy, make_trainer
from ..rank_processes import Ranks
from .test_lightning_checkpoints import assert_same_value, fit_and_save, resume, small_steps

SHARDED = {"strategy_options": {"state_dict_type": "sharded"}}
NAME = f"step={BATCHES_PER_EPOCH}.ckpt"


def folder_of(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}


def consolidate(directory: Path, file: Path) -> Path:
    """Lightning's own tool."""
    command = ["-m", "lightning.pytorch.utilities.consolidate_checkpoint", str(directory), "--output_file", str(file)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=HANG_S)
    return file


@pytest.mark.fresh
@pytest.mark.long
def test_a_run_resumes_from_a_directory_and_from_what_lightning_makes_of_it(ranks: Ranks, tmp_path: Path) -> None:
    """Losses and weights to the bit, under this strategy, all-reduce, and "ddp"."""
    whole = ranks.run(fit_and_save, "megatron_ddp", str(tmp_path), every=BATCHES_PER_EPOCH, **SHARDED)
    directory = tmp_path / NAME
    assert folder_of(directory) == {".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"}
    assert folder_of(tmp_path) == {NAME, f"step={2 * BATCHES_PER_EPOCH}.ckpt"}
    file = consolidate(directory, tmp_path / "whole.ckpt")
    resumed = {
        "sharded": ranks.run(resume, "megatron_ddp", str(directory), **SHARDED),
        "other buckets": ranks.run(resume, "megatron_ddp", str(directory), strategy_options={"bucket_size": 400}),
        "all-reduce": ranks.run(
            resume, "megatron_ddp", str(directory), strategy_options={"use_distributed_optimizer": False}
        ),
        "consolidated": ranks.run(resume, "megatron_ddp", str(file)),
        "ddp": ranks.run(resume, "ddp", str(file)),
    }
    for name, fits in resumed.items():
        for mine, expected in zip(fits, whole, strict=True):
            assert mine.losses == expected.losses[BATCHES_PER_EPOCH:], name
            assert_same_tensors(mine.weights, expected.weights)


def test_a_sharded_run_resumes_from_one_file(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(fit_and_save, "ddp", str(tmp_path), every=BATCHES_PER_EPOCH)
    resumed = ranks.run(resume, "megatron_ddp", str(tmp_path / NAME), **SHARDED)
    for mine, expected in zip(resumed, whole, strict=True):
        assert_same_tensors(mine.weights, expected.weights)


def test_main_params_of_bf16_weights_come_along(ranks: Ranks, tmp_path: Path) -> None:
    options = {"precision": "bf16-true", **SHARDED}
    whole = ranks.run(fit_and_save, "megatron_ddp", str(tmp_path), small_steps, every=BATCHES_PER_EPOCH, **options)
    resumed = ranks.run(resume, "megatron_ddp", str(tmp_path / NAME), small_steps, **options)
    for mine, expected in zip(resumed, whole, strict=True):
        assert_same_tensors(mine.weights, expected.weights)


# --- in the background -----------------------------------------------------------------------------------------------


def test_an_asynchronous_directory_is_equal_to_the_synchronous_one(ranks: Ranks, tmp_path: Path) -> None:
    """With the plugin that makes whole files asynchronous; training goes on meanwhile."""
    ranks.run(fit_and_save, "megatron_ddp", str(tmp_path / "sync"), every=3, **SHARDED)
    ranks.run(fit_and_save_in_background, str(tmp_path / "async"))
    names = folder_of(tmp_path / "sync")
    assert names == {f"step={step}.ckpt" for step in (3, 6, 9, 12)} == folder_of(tmp_path / "async")
    for name in names:
        for key in ("model", "optimizer_0"):
            saved = [OpenDirectory(tmp_path / kind / name).read(key) for kind in ("async", "sync")]
            assert_same_value(*saved, f"{name} {key}")
        extra = [torch.load(tmp_path / kind / name / "meta.pt", weights_only=True) for kind in ("async", "sync")]
        for one in extra:
            del one["callbacks"]  # ModelCheckpoint's paths, which differ
        assert_same_value(*extra, name)


def fit_and_save_in_background(folder: str) -> Fit:
    return fit_and_save("megatron_ddp", folder, every=3, plugins=[AsyncCheckpointIO()], **SHARDED)


def test_a_background_save_that_fails_ends_the_fit_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a directory is needed")
    for message in ranks.run(fit_into_a_file, tmp_path / "file" / "last.ckpt"):
        assert "was not written: rank 0: NotADirectoryError" in message


class SavesTo(pl.Callback):
    """Saves after batch 3 to a path that cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.save_checkpoint(self.path)


def fit_into_a_file(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        fit("megatron_ddp", callbacks=[SavesTo(path)], plugins=[AsyncCheckpointIO()], **SHARDED)
    return str(raised.value)


# --- replaced, refused -----------------------------------------------------------------------------------------------


class OtherIO(TorchCheckpointIO):
    """A user's own."""


def test_a_users_checkpoint_io_is_not_passed_over_in_silence(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks.run(fit_with_other_io, str(tmp_path)):
        assert message == (
            "state_dict_type='sharded' does not save through a CheckpointIO, but the Trainer has the plugin OtherIO: "
            "leave it out, or choose state_dict_type='full'"
        )


def fit_with_other_io(folder: str) -> str:
    with pytest.raises(ValueError, match="sharded") as raised:
        fit_and_save("megatron_ddp", folder, plugins=[OtherIO()], **SHARDED)
    return str(raised.value)


@pytest.mark.parametrize("strategy", [MegatronDDPStrategy, FabricStrategy])
def test_an_unknown_kind_is_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"state_dict_type='local': expected 'full' .* or 'sharded'"):
        strategy(state_dict_type="local")


def test_a_directory_that_is_no_checkpoint_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    for message in ranks.run(resume_from_empty, str(tmp_path / "last.ckpt")):
        assert message.startswith(f"{tmp_path}/last.ckpt is no complete sharded checkpoint")


def resume_from_empty(path: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        resume("megatron_ddp", path)
    return str(raised.value)


# --- Fabric ----------------------------------------------------------------------------------------------------------


def fabric_run(folder: Path, kind: str) -> None:
    """Three steps, a save, three steps; then the last three again, from the directory."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(bucket_size=100, state_dict_type=kind))
    fabric.launch()
    path = folder / "checkpoint"

    def set_up(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(5, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))
        return fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            data = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + fabric.global_rank))
            fabric.backward(model(data).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = set_up(0)
    train(model, optimizer, range(3))
    state = {"model": model, "optimizer": optimizer, "step": 3}
    fabric.save(path, state, filter={"model": lambda name, value: name != "2.bias"})
    assert path.is_dir() == (kind == "sharded")
    train(model, optimizer, range(3, 6))

    again, other = set_up(1)
    loaded: dict[str, Any] = {"model": again, "optimizer": other, "step": 0}
    with torch.no_grad():
        bias = again.module[2].bias if hasattr(again, "module") else again[2].bias
        bias.zero_()
    with pytest.raises((RuntimeError, KeyError), match=r"2\.bias"):
        fabric.load(path, loaded)
    remainder = fabric.load(path, loaded, strict=False)
    assert (loaded["step"], remainder) == (3, {})
    assert not bias.any(), "left out by the filter"
    fabric.save(folder / "whole", state)
    fabric.load(folder / "whole", {"model": again})
    for mine, expected in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, expected)
    everything = fabric.load(folder / "whole")
    assert set(everything) == {"model", "optimizer", "step"}
    assert set(everything["model"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_fabric_saves_and_loads_alike(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks.run(fabric_run, tmp_path, kind)


# --- whose, where and when -------------------------------------------------------------------------------------------


def test_buffers_are_those_of_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    """BatchNorm's statistics differ by rank within a step; the parts of a directory must not come from several."""
    weights = ranks.run(fit_and_save_own, tmp_path / "last.ckpt")
    saved = OpenDirectory(tmp_path / "last.ckpt").read("model")
    assert not torch.equal(weights[0]["norm.running_var"], weights[1]["norm.running_var"])
    for name, value in weights[0].items():
        assert torch.equal(saved[name], value), name


def fit_and_save_own(path: Path) -> dict[str, Any]:
    trainer = make_trainer(make_strategy("megatron_ddp", state_dict_type="sharded"), max_epochs=1)
    module = AwkwardModule()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    return {name: value.clone() for name, value in module.state_dict().items()}


def fit_and_save_kind(path: Path, kind: str) -> None:
    trainer = make_trainer(make_strategy("megatron_ddp", state_dict_type=kind), max_epochs=1)
    trainer.fit(AwkwardModule(), loader())
    trainer.save_checkpoint(path)


def test_an_asynchronous_save_after_the_fit_is_there_when_it_returns(ranks: Ranks, tmp_path: Path) -> None:
    """No later call would wait for it, or raise its error."""
    assert ranks.run(save_after_fit, tmp_path / "last.ckpt") == [True, True]


def save_after_fit(path: Path) -> bool:
    strategy = make_strategy("megatron_ddp", state_dict_type="sharded")
    trainer = make_trainer(strategy, max_epochs=1, plugins=[AsyncCheckpointIO()])
    trainer.fit(AwkwardModule(), loader())
    trainer.save_checkpoint(path)
    return is_directory_checkpoint(path)


def complete_in(folder: Path) -> int:
    """The number of complete checkpoints."""
    return sum(is_directory_checkpoint(path) for path in folder.glob("*.ckpt"))


def fit_slowly_in_background(folder: Any, count: Callable[[Any], int] = complete_in) -> list[int]:
    """How many complete checkpoints there are at the start of each batch, when saving takes longer than a batch."""
    write_data = FileSystemWriter.write_data

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(0.2)
        return write_data(*arguments)

    FileSystemWriter.write_data = write_slowly  # type: ignore[method-assign]
    try:
        saver = ModelCheckpoint(folder, save_top_k=1, every_n_train_steps=1, filename="{step}")
        counts = Counts(lambda: count(folder))
        fit(
            "megatron_ddp",
            callbacks=[saver, counts],
            enable_checkpointing=True,
            plugins=[AsyncCheckpointIO()],
            **SHARDED,
        )
    finally:
        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    return counts.found


class Counts(pl.Callback):
    def __init__(self, count: Callable[[], int]) -> None:
        self._count, self.found = count, list[int]()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.found.append(self._count())


@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_damaged_directory_is_refused_by_all_ranks(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "last.ckpt"
    ranks.run(fit_and_save_kind, path, "sharded")
    part = path / "__1_0.distcp"
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-100])
    for message in ranks.run(resume_from_empty, str(path)):
        assert message.startswith(f"{path} is not complete: __1_0.distcp is {damage}")


class WithExtraState(AwkwardModule):
    """Keeps something that is no tensor in its state_dict."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return {"empty": {}, 1: "one", "list": [1, {}], "batches": len(self.losses)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_comes_back_as_it_was(ranks: Ranks, tmp_path: Path) -> None:
    for extra in ranks.run(fit_with_extra_state, tmp_path / "last.ckpt"):
        assert extra == {"empty": {}, 1: "one", "list": [1, {}], "batches": BATCHES_PER_EPOCH}


def fit_with_extra_state(path: Path) -> Any:
    strategy_options = {"state_dict_type": "sharded"}
    trainer = make_trainer(make_strategy("megatron_ddp", **strategy_options), max_epochs=1)
    trainer.fit(WithExtraState(), loader())
    trainer.save_checkpoint(path)
    module = WithExtraState()
    make_trainer(make_strategy("megatron_ddp", **strategy_options)).fit(module, loader(), ckpt_path=str(path))
    return module.extra
