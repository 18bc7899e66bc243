"""A checkpoint file is complete or not there, never twice in memory, and one that is broken or does not fit says so."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.cloud_io import _atomic_save
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn

from megastrategy._checkpoints import files as checkpoint_files
from megastrategy._checkpoints.files import load_file, save_file
from megastrategy._lightning.checkpoint_io import CompleteFileIO
from megastrategy.core import CheckpointError

from ..fabric_loops import make_fabric
from ..fits import (
    BATCHES_PER_EPOCH,
    STATE,
    AwkwardModule,
    adamw,
    assert_same_tensors,
    fit,
    fit_saving,
    loader,
    make_strategy,
    make_trainer,
    saver,
)
from ..rank_processes import Failure, Ranks

NEWER = {"weight": -STATE["weight"], "step": 2}  # type: ignore[operator]


def assert_is(path: Path, state: dict[str, Any]) -> None:
    loaded = torch.load(path, weights_only=True)
    assert loaded["step"] == state["step"]
    assert torch.equal(loaded["weight"], state["weight"])


# --- complete, or what was there before ------------------------------------------------------------------------------


def kill_self(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("never reached")


class KillsWhenPickled:
    __reduce__ = kill_self  # type: ignore[assignment]


def save_and_die(path: Path, moment: str) -> None:
    """In a process of its own."""
    state: dict[str, Any] = dict(NEWER)
    if moment == "pickling":
        state["bomb"] = KillsWhenPickled()
    elif moment == "writing":  # the write that goes beyond the limit is cut short, and the next kills
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (700_001, 700_001))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    elif moment == "fsync":
        os.fsync = kill_self  # type: ignore[assignment]
    elif moment == "replace":
        Path.replace = kill_self  # type: ignore[assignment, method-assign]
    elif moment == "replaced":
        checkpoint_files.sync_directory = kill_self  # type: ignore[assignment]
    save_file(state, path)


@pytest.mark.parametrize("moment", ["pickling", "writing", "fsync", "replace", "replaced"])
def test_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path, moment: str) -> None:
    """And the next save is not hindered by what it left beside it."""
    path = tmp_path / "last.ckpt"
    save_file(STATE, path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.doors.fits"])
    process = context.Process(target=save_and_die, args=(path, moment))
    process.start()
    process.join(60)
    assert process.exitcode == -(signal.SIGXFSZ if moment == "writing" else signal.SIGKILL)
    assert_is(path, NEWER if moment == "replaced" else STATE)
    left = [] if moment == "replaced" else [".last.ckpt.incomplete"]
    assert sorted(os.listdir(tmp_path)) == [*left, "last.ckpt"]
    save_file(NEWER, path)
    assert_is(path, NEWER)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_content_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a machine that loses power may come back with a complete name on an empty file."""
    path, synced = tmp_path / "last.ckpt", []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((Path(name).name, os.fstat(descriptor).st_size, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save_file(STATE, path)
    size = path.stat().st_size
    assert size > 1_200_000
    assert [(name, there) for name, _, there in synced] == [(".last.ckpt.incomplete", False), (tmp_path.name, True)]
    assert synced[0][1] == size


# --- memory ----------------------------------------------------------------------------------------------------------


LARGE_BYTES = 40 * 2**20
"""A tensor larger than any that malloc keeps for itself when it is freed."""


def status(field: str) -> int:
    """Bytes, from the kernel's account of this process."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_growth(run: Callable[[], Any]) -> int:
    """How much more memory than before was resident at any time."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be there to be used again
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = status("VmHWM")
    run()
    return status("VmHWM") - before


def test_saving_makes_no_copy_of_the_state(tmp_path: Path) -> None:
    state = {"weight": torch.ones(LARGE_BYTES // 4)}
    assert peak_growth(lambda: save_file(state, tmp_path / "ours.ckpt")) < LARGE_BYTES / 8
    assert peak_growth(lambda: _atomic_save(state, tmp_path / "theirs.ckpt")) > 0.9 * LARGE_BYTES, "the measure works"


def test_loading_maps_the_file(tmp_path: Path) -> None:
    """All of it is looked at, and no page of it counts as this process's own; but the one that is written to."""
    path = tmp_path / "last.ckpt"
    save_file({"weight": torch.ones(LARGE_BYTES // 4)}, path)
    before = status("RssAnon")
    loaded = load_file(path)
    assert loaded["weight"].sum().item() == LARGE_BYTES // 4
    assert status("RssAnon") - before < LARGE_BYTES / 8
    read = torch.load(path)
    assert status("RssAnon") - before > 0.9 * LARGE_BYTES, "the measure works"
    loaded["weight"][0] = 7.0
    assert torch.load(path, mmap=True)["weight"][0] == 1.0, "the file is not written through"
    assert read["weight"][0] == 1.0


# --- what is loaded --------------------------------------------------------------------------------------------------


def broken_files(folder: Path) -> dict[Path, str]:
    """Path -> what its error says."""
    made = {}
    torch.save(STATE, folder / "zip.ckpt")
    content = (folder / "zip.ckpt").read_bytes()
    for size in (5, 100, 10_000, len(content) - 1):
        path = folder / f"zip_{size}.ckpt"
        path.write_bytes(content[:size])
        made[path] = f"is cut off after {size:,} bytes"
    (folder / "empty.ckpt").touch()
    (folder / "text.ckpt").write_text("hello, I am no checkpoint\n" * 100)
    with zipfile.ZipFile(folder / "other.ckpt", "w") as archive:
        archive.writestr("word/document.xml", "text")
    made[folder / "empty.ckpt"] = "is empty"
    return made | {folder / f"{name}.ckpt": "is no checkpoint" for name in ("text", "other")}


def test_broken_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    made = broken_files(tmp_path)
    assert len(made) == 7
    for path, problem in made.items():
        for weights_only in (True, False):
            with pytest.raises(CheckpointError) as raised:
                load_file(path, weights_only=weights_only)
            assert str(raised.value).startswith(f"{path} {problem}")


# --- through strategies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["lightning", "pytorch_lightning", "fabric", "lightning_fabric"])
def test_strategies_save_whole_files_by_default(door: str, tmp_path: Path) -> None:
    strategy_class: Any = getattr(__import__(f"megastrategy.{door}", fromlist=["x"]), "MegatronDDPStrategy")  # noqa: B009
    mirrors = "lightning_fabric" if door in ("pytorch_lightning", "lightning_fabric") else "lightning.fabric"
    lightnings = __import__(f"{mirrors}.plugins", fromlist=["x"]).TorchCheckpointIO
    io = strategy_class().checkpoint_io
    assert isinstance(io, CompleteFileIO)
    assert isinstance(io, lightnings)
    assert not isinstance(strategy_class(checkpoint_io=lightnings()).checkpoint_io, CompleteFileIO)
    for path in (tmp_path / "a" / "last.ckpt", f"file://{tmp_path}/b/last.ckpt", "memory://c/last.ckpt"):
        io.save_checkpoint(STATE, path)
        assert torch.equal(io.load_checkpoint(path)["weight"], STATE["weight"])  # type: ignore[arg-type]
        io.remove_checkpoint(path)
        with pytest.raises(FileNotFoundError, match=r"not found: .*last\.ckpt"):
            io.load_checkpoint(path)


def test_asynchronous_file_is_the_same(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(fit_saving, tmp_path / "sync")
    ranks.run(fit_saving, tmp_path / "async", (AsyncCheckpointIO(),))
    for step in (7, 14):
        ours, theirs = (
            torch.load(tmp_path / kind / f"step={step}.ckpt", weights_only=True) for kind in ("async", "sync")
        )
        assert_same_tensors(ours["state_dict"], theirs["state_dict"])
        states = (found["optimizer_states"][0]["state"] for found in (ours, theirs))
        for mine, expected in zip(*(state.values() for state in states), strict=True):
            assert_same_tensors(mine, expected)
    assert sorted(os.listdir(tmp_path / "async")) == ["step=14.ckpt", "step=7.ckpt"]


class FillsTheDisk(pl.Callback):
    """Rank 0's disk, before the second checkpoint is saved."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == BATCHES_PER_EPOCH + 1 and trainer.global_rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # this process ends with the fit


def test_full_disk_ends_a_fit_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.outcomes(fit_filling_the_disk, tmp_path)
    full, waiting = outcomes
    assert isinstance(full, Failure)
    assert isinstance(waiting, Failure)
    assert full.kind == "OSError"
    assert str(tmp_path / "step=14.ckpt") in full.message
    assert "was not saved (File too large)" in full.message
    assert waiting.seconds < 30
    assert os.listdir(tmp_path) == ["step=7.ckpt"]
    assert torch.load(tmp_path / "step=7.ckpt", weights_only=True)["global_step"] == BATCHES_PER_EPOCH


def fit_filling_the_disk(folder: Path) -> None:
    fit("megatron_ddp", callbacks=[saver(folder), FillsTheDisk()], enable_checkpointing=True)


# --- what does not fit ----------------------------------------------------------------------------------------------


def two_groups(params: Any) -> torch.optim.Optimizer:
    first, *rest = params
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=1e-2)


def resume_what_does_not_fit(path: Path, optimizer: Callable[[Any], torch.optim.Optimizer]) -> str:
    trainer = make_trainer(make_strategy("megatron_ddp"))
    with pytest.raises(CheckpointError) as raised:
        trainer.fit(AwkwardModule(optimizer), loader(), ckpt_path=path)
    assert not any(optimizer.state for optimizer in trainer.optimizers)
    return str(raised.value)


def test_trainer_says_what_does_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(fit_saving, tmp_path)
    whole = tmp_path / "step=7.ckpt"
    for message in ranks.run(resume_what_does_not_fit, whole, two_groups):
        assert "parameter groups of" in message
    (tmp_path / "short.ckpt").write_bytes(whole.read_bytes()[:1000])
    torch.save(AwkwardModule().state_dict(), tmp_path / "weights.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    problems = {"short": "is cut off", "weights": "is no checkpoint of a Trainer", "list": "got a list"}
    for name, problem in problems.items():
        path = tmp_path / f"{name}.ckpt"
        for message in ranks.run(resume_what_does_not_fit, path, adamw):
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


def load_with_fabric(path: Path) -> None:
    fabric = make_fabric("megatron_ddp", {"bucket_size": 20})
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


def test_loaded_state_is_no_part_of_its_file(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(load_with_fabric, tmp_path / "last.ckpt")
