"""``inspect`` says what a path is that is no checkpoint of ours, and waits for none."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from megastrategy.core import CheckpointError
from megastrategy.tools.commands import root
from megastrategy.tools.contents import inspect_checkpoint, loads_with
from megastrategy.tools.conversion import consolidate
from tests.doors.lightning.test_checkpoint_files import without_privileges


def said_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        inspect_checkpoint(path)
    assert str(raised.value).startswith(f"{path} ")
    return str(raised.value).removeprefix(f"{path} ")


def deepspeed(path: Path) -> None:
    (path / "global_step10").mkdir()
    (path / "latest").write_text("global_step10")
    (path / "zero_to_fp32.py").write_text("")
    torch.save({"module": {}}, path / "global_step10" / "mp_rank_00_model_states.pt")
    torch.save({}, path / "global_step10" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def megatron_lm(path: Path) -> None:
    (path / "latest_checkpointed_iteration.txt").write_text("10")
    (path / "iter_0000010").mkdir()


def parts_without_index(path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, path / "model-00001-of-00002.safetensors")


FOLDERS: dict[Callable[[Path], None], str] = {
    lambda path: None: "is an empty folder: check the path",
    deepspeed: "is a checkpoint of DeepSpeed: python {path}/zero_to_fp32.py {path} OUT writes its weights",
    megatron_lm: "is a checkpoint of Megatron-LM: ",
    parts_without_index: "has 1 parts of a model (model-00001-of-00002.safetensors, ...) without the index",
}


@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_folders_of_others_are_called_by_their_names(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    assert said_of(tmp_path).startswith(FOLDERS[make].format(path=tmp_path))


def test_the_inner_folder_of_deepspeed_is_known_too(tmp_path: Path) -> None:
    deepspeed(tmp_path)
    assert said_of(tmp_path / "global_step10").startswith(f"is a checkpoint of DeepSpeed: python {tmp_path}/zero_to_")


def test_pipes_sockets_and_devices_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        assert said_of(tmp_path / "socket") == "is a socket, not a file or folder: check the path"
    assert said_of(tmp_path / "pipe") == "is a named pipe, not a file or folder: check the path"
    assert said_of(Path("/dev/null")) == "is a device, not a file or folder: check the path"
    result = CliRunner().invoke(root, ["checkpoint", "convert", str(tmp_path / "pipe"), str(tmp_path / "out")])
    assert result.exit_code != 0
    assert "is a named pipe" in result.output


def test_links_that_lead_nowhere_and_missing_paths_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    assert said_of(tmp_path / "last.ckpt") == "is a link to gone.ckpt, which is not there: check the path"
    assert said_of(tmp_path / "none.ckpt") == "is not there: check the path"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_may_not_be_read_is_said(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # above tmp_path are directories that only its owner may enter
        os.chmod(folder, 0o755)
        path = Path(folder) / "last.ckpt"
        if kind == "file":
            torch.save({}, path)
        else:
            path.mkdir()
        path.chmod(0)
        with without_privileges():
            assert said_of(path) == "cannot be read: Permission denied"
        path.chmod(0o700)


def test_safetensors_are_loaded_by_safetensors(tmp_path: Path) -> None:
    weights = {"one": torch.ones(3), "two": torch.zeros(2, 2, dtype=torch.bfloat16)}
    for name in ("model.safetensors", "without_suffix"):
        safetensors.torch.save_file(weights, tmp_path / name)
        contents = inspect_checkpoint(tmp_path / name)
        found = {entry.owner: (entry.shape, entry.dtype) for entry in contents.entries}
        assert found == {key: (tuple(value.shape), value.dtype) for key, value in weights.items()}
        [(_, how)] = loads_with(contents)
        assert how == "module.load_state_dict(safetensors.torch.load_file(PATH)), before training"
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-4])
    assert said_of(tmp_path / "cut.safetensors").startswith("is cut off: ")


def test_an_index_stands_for_its_files(tmp_path: Path) -> None:
    for number, name in enumerate(("one", "two"), 1):
        safetensors.torch.save_file({name: torch.ones(number)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(("one", "two"), 1)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for path in (index, tmp_path):
        assert {entry.owner: entry.shape for entry in inspect_checkpoint(path).entries} == {"one": (1,), "two": (2,)}
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert said_of(index) == "names model-00002-of-00002.safetensors, which is not there: download or copy it, too"


def test_texts_and_archives_are_no_checkpoints(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 100\n"
    for name in ("pointer.ckpt", "pointer.safetensors"):
        (tmp_path / name).write_text(pointer)
    (tmp_path / "text.safetensors").write_bytes(b"\xff" * 40)
    (tmp_path / "config.yaml").write_text("model: 3\n" * 9)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    whole = (tmp_path / "archive.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    assert said_of(tmp_path / "pointer.ckpt").startswith("is a pointer of Git LFS")
    assert said_of(tmp_path / "pointer.safetensors").startswith("is a pointer of Git LFS")
    assert said_of(tmp_path / "text.safetensors").startswith("is no file of safetensors, or is cut off")
    assert said_of(tmp_path / "config.yaml").startswith("is no checkpoint: torch.save did not write it")
    assert said_of(tmp_path / "archive.zip").startswith("is no checkpoint: torch.save did not write it")
    assert said_of(tmp_path / "cut.zip").startswith("is cut off after")


def test_folders_of_others_are_named_where_a_directory_is_consolidated(tmp_path: Path) -> None:
    deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint of DeepSpeed"):
        consolidate(tmp_path, tmp_path.parent / "out.ckpt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is an empty folder"):
        consolidate(tmp_path / "empty", tmp_path.parent / "out.ckpt")
