"""A checkpoint file is complete or not there, never twice in memory, and one that is broken says so."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import resource
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from lightning.fabric.utilities.cloud_io import _atomic_save

from megastrategy._checkpoints import files as checkpoint_files
from megastrategy._checkpoints.files import load_file, save_file
from megastrategy.core import CheckpointError

from ..fits import STATE

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
def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path, moment: str) -> None:
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


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    for kind, is_zip in (("zip", True), ("legacy", False)):
        torch.save(STATE, folder / f"{kind}.ckpt", _use_new_zipfile_serialization=is_zip)
        content = (folder / f"{kind}.ckpt").read_bytes()
        for size in (5, 100, 10_000, len(content) - 1):
            path = folder / f"{kind}_{size}.ckpt"
            path.write_bytes(content[:size])
            made[path] = f"is cut off after {size:,} bytes"
    (folder / "empty.ckpt").touch()
    (folder / "text.ckpt").write_text("hello, I am no checkpoint\n" * 100)
    (folder / "pickle.ckpt").write_bytes(pickle.dumps({"a": 1}, protocol=2)[:-3])
    with zipfile.ZipFile(folder / "other.ckpt", "w") as archive:
        archive.writestr("word/document.xml", "text")
    made[folder / "empty.ckpt"] = "is empty"
    return made | {folder / f"{name}.ckpt": "is no checkpoint" for name in ("text", "pickle", "other")}


def test_a_broken_file_is_an_error_with_its_path_and_what_is_wrong(tmp_path: Path) -> None:
    made = broken_files(tmp_path)
    assert len(made) == 12
    for path, problem in made.items():
        for weights_only in (True, False):
            with pytest.raises(CheckpointError) as raised:
                load_file(path, weights_only=weights_only)
            assert str(raised.value).startswith(f"{path} {problem}")
