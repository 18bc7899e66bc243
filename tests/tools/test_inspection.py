"""``inspect`` lists the contents, to the byte, and reads no tensor's data."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch import nn

from megastrategy.core import CheckpointError
from megastrategy.tools.contents import Contents, inspect_checkpoint, loads_with
from megastrategy.tools.conversion import consolidate, names_from
from megastrategy.tools.rendering import render
from tests.doors.fits import BATCHES_PER_EPOCH

from .conftest import Saved, in_groups


def text_of(contents: Contents, depth: int | None = None) -> str:
    console = Console(width=1000)
    with console.capture() as capture:
        for renderable in render(contents, depth):
            console.print(renderable)
    return capture.get()


def verdicts(contents: Contents) -> dict[str, str]:
    return dict(loads_with(contents))


def test_both_kinds_have_all_of_a_run(directory: Saved, file: Saved) -> None:
    """Names, shapes and dtypes are those of the module; every parameter that was stepped has AMSGrad's four."""
    module = in_groups()
    weights = {name: (tuple(value.shape), value.dtype, value.nbytes) for name, value in module.state_dict().items()}
    optimizer = module.configure_optimizers()["optimizer"]
    trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
    for saved in (directory, file):
        contents = inspect_checkpoint(saved.path)
        [entries] = contents.models.values()
        assert {entry.owner: (entry.shape, entry.dtype, entry.nbytes) for entry in entries} == weights
        [states] = contents.optimizers
        assert states.sizes == [len(group["params"]) for group in optimizer.param_groups]
        assert [group["lr"] for group in states.groups] == [3e-3 / 2, 1e-2 / 2, 1e-2 / 2], "halved after five steps"
        moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        assert sorted((entry.what, entry.shape) for entry in states.entries if entry.what != "step") == sorted(
            (what, tuple(param.shape)) for what in moments for param in trained.values()
        )
        assert len([entry for entry in states.entries if entry.what == "step"]) == len(trained)
        assert (contents.parts.extra["epoch"], contents.parts.extra["global_step"]) == (0, BATCHES_PER_EPOCH)
    by_name = {entry.owner for entry in inspect_checkpoint(directory.path).optimizers[0].entries}
    assert by_name == set(trained)
    names = {param: name for name, param in module.named_parameters()}
    in_order = [names[param] for group in optimizer.param_groups for param in group["params"]]
    by_number = {entry.owner for entry in inspect_checkpoint(file.path).optimizers[0].entries}
    assert by_number == {f"#{number}" for number, name in enumerate(in_order) if name in trained}


def test_report_names_parameters_and_state(directory: Saved, file: Saved) -> None:
    report = text_of(inspect_checkpoint(directory.path)).splitlines()
    assert report[0] == f"{directory.path}: a sharded directory, by a Lightning Trainer (2.6.6)"
    [line] = [line for line in report if line.startswith("side.weight ") and "13x13" in line and "optimizer_0" in line]
    assert line.split("  ")[0] == "side.weight"
    for word in ("float32", "676", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
        assert word in line
    for name in in_groups().state_dict():
        assert any(line.startswith(f"{name} ") for line in report), name
    short = text_of(inspect_checkpoint(file.path), depth=1)
    inputs = next(line.split() for line in short.splitlines() if line.startswith("inputs"))
    assert inputs == ["inputs", "2", "78", "float32", "312"]
    assert "inputs.weight" not in short
    assert "inputs.weight" in text_of(inspect_checkpoint(file.path), depth=2)


def test_loaders_are_told(directory: Saved, file: Saved, bf16: dict[str, Saved], tmp_path: Path) -> None:
    sharded, whole = verdicts(inspect_checkpoint(directory.path)), verdicts(inspect_checkpoint(file.path))
    others = '"ddp", "auto"'
    assert sharded['"megatron_ddp"'] == whole['"megatron_ddp"'] == whole[others]
    assert "consolidate" in sharded[f"{others}, plain torch"]
    assert "rounded weights" in verdicts(inspect_checkpoint(bf16["full"].path))[others]
    torch.save(in_groups().state_dict(), tmp_path / "weights.pt")
    assert list(verdicts(inspect_checkpoint(tmp_path / "weights.pt"))) == ["plain torch"]
    torch.save({"state_dict": {"w": torch.ones(1)}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "weights.ckpt")
    assert "weights only" in verdicts(inspect_checkpoint(tmp_path / "weights.ckpt"))[others]
    shutil.copytree(directory.path, tmp_path / "bare")
    (tmp_path / "bare" / "meta.pt").unlink()
    assert "meta.pt" in verdicts(inspect_checkpoint(tmp_path / "bare"))['"megatron_ddp"']


class Custom:
    """A user's class in a checkpoint."""

    def __init__(self) -> None:
        self.weights = nn.Linear(2, 2).weight.detach()


def test_object_of_users_class_needs_trust(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(3)}, "custom": Custom()}, tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"file holds an object of tests.tools.test_inspection.Custom.*--trust"):
        inspect_checkpoint(tmp_path / "file")
    assert inspect_checkpoint(tmp_path / "file", trust=True).plain["custom"] == "Custom"


class _Runs:
    """Makes a folder when it is unpickled, as an untrusted checkpoint could run any command."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.makedirs, (str(self.trace), 0o777, True)


def spoiled_metadata(path: Path, trace: Path) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.version = _Runs(trace)  # type: ignore[assignment]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def spoiled_value(path: Path, trace: Path) -> None:
    shutil.rmtree(path)
    optimizer = {"state": {}, "param_groups": [{"params": ["weight"], "lr": _Runs(trace)}]}
    dcp.save({"model": {"weight": torch.ones(3)}, "optimizer": optimizer}, checkpoint_id=path, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # it is not needed to write one
@pytest.mark.parametrize(
    ("read", "spoil"),
    [("inspect", spoiled_metadata), ("consolidate", spoiled_value), ("names", spoiled_metadata)],
)
def test_directory_runs_no_code_unless_trusted(
    directory: Saved, tmp_path: Path, spoil: Callable[[Path, Path], None], read: str
) -> None:
    path, trace = tmp_path / "directory", tmp_path / "trace"
    shutil.copytree(directory.path, path)
    spoil(path, trace)
    calls: dict[str, Callable[[bool], object]] = {
        "inspect": lambda trust: inspect_checkpoint(path, trust),
        "consolidate": lambda trust: consolidate(path, tmp_path / "file.ckpt", trust=trust),
        "names": lambda trust: names_from(path, trust),
    }
    with pytest.raises(CheckpointError, match=r"directory.* holds an object of os\.makedirs.*--trust"):
        calls[read](False)
    assert not trace.exists()
    calls[read](True)
    assert trace.is_dir()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"plain text", "torch.save did not write it"),
        ([1, 2], "holds a list, not a dictionary"),
        ("directory", "is no complete sharded checkpoint"),
    ],
)
def test_other_file_is_no_checkpoint(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "last.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "directory":
        path.mkdir()
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(path)


def test_cut_off_file_and_metadata_are_named(file: Saved, directory: Saved, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(file.path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="file is cut off"):
        inspect_checkpoint(tmp_path / "file")
    shutil.copytree(directory.path, tmp_path / "directory")
    (tmp_path / "directory" / ".metadata").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"directory is no complete directory of .*: EOFError"):
        inspect_checkpoint(tmp_path / "directory")


# --- paths that are no checkpoint of ours -----------------------------------------------------------------------------


def deepspeed(path: Path) -> None:
    (path / "global_step10").mkdir()
    (path / "latest").write_text("global_step10")
    (path / "zero_to_fp32.py").write_text("")
    torch.save({"module": {}}, path / "global_step10" / "mp_rank_00_model_states.pt")
    torch.save({}, path / "global_step10" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def test_foreign_folder_is_not_consolidated(tmp_path: Path) -> None:
    deepspeed(tmp_path)
    script = f"{tmp_path}/zero_to_fp32.py"
    for read in (inspect_checkpoint, lambda path: consolidate(path, path.parent / "out.ckpt")):
        with pytest.raises(CheckpointError, match=f"is a checkpoint of DeepSpeed: python {script} {tmp_path} OUT"):
            read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is no complete sharded checkpoint"):
        consolidate(tmp_path / "empty", tmp_path.parent / "out.ckpt")
