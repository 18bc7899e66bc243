"""``state_dict_type="sharded"``: directories that every rank writes its part of, and that everybody can read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import strategy as lightnings
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import MegatronDDPStrategy
from megastrategy.core import CheckpointError, OpenDirectory, is_directory_checkpoint
from megastrategy.lightning import MAIN_PARAMS_KEY
from megastrategy.tools.checkpoint_parts import read_file
from tests.support.comparison import assert_equal, message
from tests.support.prescribed_grads import Ours, adam, assert_same_file, trained
from tests.support.ranks import run_ranks
from tests.support.timeouts import HANG_S

from ..fits import (
    BATCHES_PER_EPOCH,
    AwkwardModule,
    Fit,
    assert_same_tensors,
    fit,
    loader,
    make_strategy,
    make_trainer,
    weights_of,
)
from ..rank_processes import Ranks
from .test_lightning_checkpoints import assert_same_value, fit_and_save, resume, small_steps

SHARDED = {"strategy_options": {"state_dict_type": "sharded"}}
NAME = f"step={BATCHES_PER_EPOCH}.ckpt"


def consolidate(directory: Path, file: Path) -> Path:
    """Lightning's own tool."""
    command = ["-m", "lightning.pytorch.utilities.consolidate_checkpoint", str(directory), "--output_file", str(file)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=HANG_S)
    return file


@pytest.mark.nightly
def test_run_resumes_from_a_directory_and_its_file(ranks: Ranks, tmp_path: Path) -> None:
    """Losses and weights to the bit, under this strategy, all-reduce, and "ddp"."""
    whole = ranks.run(fit_and_save, "megatron_ddp", str(tmp_path), every=BATCHES_PER_EPOCH, **SHARDED)
    directory = tmp_path / NAME
    assert set(os.listdir(directory)) == {".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"}
    assert set(os.listdir(tmp_path)) == {NAME, f"step={2 * BATCHES_PER_EPOCH}.ckpt"}
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


def test_sharded_run_resumes_from_one_file(ranks: Ranks, tmp_path: Path) -> None:
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


def test_asynchronous_directory_is_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """With the plugin that makes whole files asynchronous; training goes on meanwhile."""
    ranks.run(fit_and_save, "megatron_ddp", str(tmp_path / "sync"), every=3, **SHARDED)
    ranks.run(fit_and_save_in_background, str(tmp_path / "async"))
    names = set(os.listdir(tmp_path / "sync"))
    assert names == {f"step={step}.ckpt" for step in (3, 6, 9, 12)} == set(os.listdir(tmp_path / "async"))
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


def test_failed_background_save_ends_the_fit_on_all(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a directory is needed")
    for text in ranks.run(fit_into_a_file, tmp_path / "file" / "last.ckpt"):
        assert "was not written: rank 0: NotADirectoryError" in text


class SavesTo(pl.Callback):
    """Saves after batch 3 to a path that cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.save_checkpoint(self.path)


def fit_into_a_file(path: Path) -> str:
    options = {"callbacks": [SavesTo(path)], "plugins": [AsyncCheckpointIO()], **SHARDED}
    return message(CheckpointError, lambda: fit("megatron_ddp", **options))


def save_after_a_fit(path: Path, plugins: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The weights that are saved on this rank; a save in the background is complete when it returns here."""
    trainer = make_trainer(make_strategy("megatron_ddp", state_dict_type="sharded"), max_epochs=1, plugins=[*plugins])
    module = AwkwardModule()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    assert is_directory_checkpoint(path)
    return weights_of(module)


def test_buffers_in_a_directory_are_those_of_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    """BatchNorm's statistics differ by rank within a step; the parts of a directory must not come from several."""
    weights = ranks.run(save_after_a_fit, tmp_path / "last.ckpt", (AsyncCheckpointIO(),))
    saved = OpenDirectory(tmp_path / "last.ckpt").read("model")
    assert not torch.equal(weights[0]["norm.running_var"], weights[1]["norm.running_var"])
    for name, value in weights[0].items():
        assert torch.equal(saved[name], value), name


# --- refused ---------------------------------------------------------------------------------------------------------


class OtherIO(TorchCheckpointIO):
    """A user's own."""


def fit_with_other_io(folder: str) -> str:
    return message(ValueError, lambda: fit_and_save("megatron_ddp", folder, plugins=[OtherIO()], **SHARDED))


def test_users_checkpoint_io_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(fit_with_other_io, str(tmp_path)):
        assert text == (
            "state_dict_type='sharded' does not save through a CheckpointIO, but the Trainer has the plugin OtherIO: "
            "leave it out, or choose state_dict_type='full'"
        )


# --- main params -----------------------------------------------------------------------------------------------------


class TwoOptimizers(AwkwardModule):
    """The first is over a parameter that is not the module's, and stays whole; bf16 weights have main params."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.stranger = [nn.Parameter(torch.ones(3))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.stranger, lr=0.1), torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class RecordsMainParams(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at_start = self.copies(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at_end = self.copies(trainer)

    def copies(self, trainer: Any) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in trainer.strategy.optimizers[1].main_params().items()}


def main_params_of_two_optimizers(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Main params when they are saved, and after they were loaded."""
    records = []
    for epochs, source in ((1, None), (2, str(path))):
        records.append(RecordsMainParams())
        strategy = make_strategy("megatron_ddp")
        trainer = make_trainer(strategy, precision="bf16-true", max_epochs=epochs, callbacks=[records[-1]])
        trainer.fit(TwoOptimizers(), loader(), ckpt_path=source)
        if source is None:
            trainer.save_checkpoint(path)
    return records[0].at_end, records[1].at_start


def test_main_params_stand_at_their_optimizers_number(ranks: Ranks, tmp_path: Path) -> None:
    """The tools number them over all optimizers, and so does the file."""
    path = tmp_path / "last.ckpt"
    (saved, loaded), _ = ranks.run(main_params_of_two_optimizers, path)
    whole = torch.load(path, weights_only=True)
    assert [len(params) for params in whole[MAIN_PARAMS_KEY]] == [0, len(saved)]
    assert set(read_file(path).main_params) == {"optimizer_1"}
    assert_equal(loaded, saved)


# --- state on the host -----------------------------------------------------------------------------------------------


class Environment:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def local_rank(self) -> int:
        return self._rank


def test_lightning_moves_no_loaded_state_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``offload_optimizer_states``; as it does with every optimizer, all of the state at once."""
    file = trained(2, adam, torch.float32, range(2))

    def refuse(*_: Any) -> None:
        raise AssertionError("state was moved")

    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, adam, torch.float32, offload_optimizer_states=True)
        devices = [torch.device("cpu")] * 2
        strategy: Any = MegatronDDPStrategy(parallel_devices=devices, cluster_environment=Environment(rank))
        strategy._engine, strategy._lightning_module = ours.model.engine, ours.module
        strategy.optimizers = [ours.optimizer]
        strategy.load_optimizer_state_dict({"state_dict": file["model"], "optimizer_states": [file["optimizer"]]})
        assert_same_file(ours.file()["optimizer"], file["optimizer"])
        ours.model.close()

    monkeypatch.setattr(lightnings, "_optimizer_to_device", refuse)
    run_ranks(2, run)
