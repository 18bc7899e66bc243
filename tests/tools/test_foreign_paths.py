"""``inspect`` says what a path is that is no checkpoint of ours, and waits for none."""

from __future__ import annotations

import os
import socket
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


def test_folders_of_others_are_named_where_a_directory_is_consolidated(tmp_path: Path) -> None:
    deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint of DeepSpeed"):
        consolidate(tmp_path, tmp_path.parent / "out.ckpt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is an empty folder"):
        consolidate(tmp_path / "empty", tmp_path.parent / "out.ckpt")
