"""One kind of checkpoint made of the other is what the strategy would have written, and training goes on from it."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from torch import Tensor, nn

from megastrategy.core import CheckpointError, OpenDirectory
from megastrategy.fabric import MegatronDDPStrategy as FabricStrategy
from megastrategy.lightning import MAIN_PARAMS_KEY
from megastrategy.tools.checkpoint_parts import read_file
from megastrategy.tools.conversion import consolidate, convert, names_from
from tests.doors.fits import BATCHES_PER_EPOCH, assert_same_tensors
from tests.doors.lightning.test_lightning_checkpoints import (
    amsgrad_in_groups,
    assert_same_value,
    resume,
    small_steps,
)
from tests.doors.rank_processes import Ranks
from tests.support.optimizers import KeepsNested, MatricesAndRest

from .conftest import SHARDED, Saved


def load(path: Path) -> dict[str, Any]:
    """Also a test: plain types only. Without ModelCheckpoint's state, which has the paths of a run."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    content.pop("callbacks", None)
    return content


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in values for tensor in tensors_in(item)]


def assert_same_directories(actual: Path, expected: Path) -> None:
    assert OpenDirectory(actual).keys == OpenDirectory(expected).keys
    for key in OpenDirectory(expected).keys:
        assert_same_value(OpenDirectory(actual).read(key), OpenDirectory(expected).read(key), key)
    extra = [load(path / "meta.pt") for path in (actual, expected)]
    assert_same_value(*extra, "meta.pt")


# --- a Trainer's -----------------------------------------------------------------------------------------------------


def test_consolidated_directory_is_ddps_file(directory: Saved, file: Saved, tmp_path: Path) -> None:
    """The file of the same run, whose weights are equal to the bit; with parameter numbers in the optimizer's order."""
    consolidate(directory.path, tmp_path / "whole.ckpt")
    mine, theirs = load(tmp_path / "whole.ckpt"), load(file.path)
    assert_same_value(mine, theirs, "checkpoint")
    assert list(mine["state_dict"]) == list(theirs["state_dict"])
    assert theirs["optimizer_states"][0]["param_groups"][0]["params"] == [0, 1]
    for tensor in tensors_in(mine):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "torch.save writes whole storages"
    assert [path.name for path in tmp_path.iterdir()] == ["whole.ckpt"]


def test_converted_file_is_the_ranks_directory(directory: Saved, file: Saved, tmp_path: Path) -> None:
    """Loaded as any number of ranks would."""
    whole = read_file(file.path)
    convert(whole, names_from(directory.path), tmp_path / "sharded.ckpt")
    assert_same_directories(tmp_path / "sharded.ckpt", directory.path)
    assert [path.name for path in tmp_path.iterdir()] == ["sharded.ckpt"]


def test_main_params_are_converted(bf16: dict[str, Saved], tmp_path: Path) -> None:
    consolidate(bf16["sharded"].path, tmp_path / "whole.ckpt")
    saved = load(bf16["full"].path)
    assert_same_value(load(tmp_path / "whole.ckpt"), saved, "checkpoint")
    assert len(saved[MAIN_PARAMS_KEY][0]) >= 9
    convert(read_file(bf16["full"].path), names_from(bf16["sharded"].path), tmp_path / "sharded.ckpt")
    assert_same_directories(tmp_path / "sharded.ckpt", bf16["sharded"].path)


def test_runs_resume_from_either(
    ranks: Ranks, directory: Saved, file: Saved, bf16: dict[str, Saved], tmp_path: Path
) -> None:
    """Losses and weights to the bit: sharded -> file -> "ddp", and "ddp" -> directory -> sharded."""
    consolidate(directory.path, tmp_path / "whole.ckpt")
    whole = read_file(file.path)
    convert(whole, names_from(directory.path), tmp_path / "sharded.ckpt")
    consolidate(bf16["sharded"].path, tmp_path / "bf16.ckpt")
    runs = [
        (directory, ranks.run(resume, "ddp", str(tmp_path / "whole.ckpt"), amsgrad_in_groups)),
        (file, ranks.run(resume, "megatron_ddp", str(tmp_path / "sharded.ckpt"), amsgrad_in_groups, **SHARDED)),
        (
            bf16["full"],
            ranks.run(resume, "megatron_ddp", str(tmp_path / "bf16.ckpt"), small_steps, precision="bf16-true"),
        ),
    ]
    for saved, resumed in runs:
        for mine, expected in zip(resumed, saved.whole, strict=True):
            assert mine.losses == expected.losses[BATCHES_PER_EPOCH:]
            assert_same_tensors(mine.weights, expected.weights)


def test_module_without_optimizers_is_converted(file: Saved, tmp_path: Path) -> None:
    """Lightning's stand-in has the state {}, which leaves no trace in a directory; without the list "ddp" would
    refuse to resume."""
    content = torch.load(file.path, weights_only=True)
    torch.save({**content, "optimizer_states": [{}]}, tmp_path / "file")
    convert(read_file(tmp_path / "file"), {}, tmp_path / "directory")
    consolidate(tmp_path / "directory", tmp_path / "again")
    again = load(tmp_path / "again")
    assert again["optimizer_states"] == []
    del content["optimizer_states"], content["lr_schedulers"]  # as save_weights_only leaves them out
    torch.save(content, tmp_path / "file")
    convert(read_file(tmp_path / "file"), {}, tmp_path / "directory", force=True)
    consolidate(tmp_path / "directory", tmp_path / "again", force=True)
    assert_same_value(load(tmp_path / "again"), load(tmp_path / "file"), "checkpoint")


# --- others' ----------------------------------------------------------------------------------------------------


def save_alone(state: dict[str, Any], path: Path) -> None:
    """With nothing but torch, in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*to save in a single process")
        dcp.save(state, checkpoint_id=path, no_dist=True)


def test_tensors_of_every_kind_survive(tmp_path: Path) -> None:
    """Empty ones, single numbers, and dtypes of every width; and nothing but torch has to be there."""
    kinds: dict[str, Tensor] = {
        "empty": torch.empty(0, 3),
        "number": torch.tensor(7, dtype=torch.int64),
        "truth": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).half(),
        "bfloat": torch.randn(3, 5).bfloat16(),
        "double": torch.randn(2, 2).double(),
        "complex": torch.randn(3, dtype=torch.complex64),
        "eight_bits": torch.randn(5).to(torch.float8_e4m3fn),
        "transposed": torch.randn(4, 6).t(),
    }
    state = {"model": kinds, "note": "plain", "epochs": [1, 2]}
    save_alone(state, tmp_path / "directory")
    consolidate(tmp_path / "directory", tmp_path / "file")
    loaded = load(tmp_path / "file")
    assert (loaded["note"], loaded["epochs"]) == ("plain", [1, 2])
    assert list(loaded["model"]) == list(kinds)
    for name, tensor in loaded["model"].items():
        expected = kinds[name]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(
            tensor.float() if "eight" in name else tensor, expected.float() if "eight" in name else expected
        )


# --- state of every kind, as Fabric's ranks write it ------------------------------------------------------------------


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def head_first(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": params[2:]}, {"params": params[:2]}], lr=1e-2)


def adafactor(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Keeps rows and columns of matrices, and all of vectors."""
    return torch.optim.Adafactor(params, lr=0.02)


def matrices_and_rest(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Steps one group whole and one as shards."""
    matrices = [param for param in params if param.dim() > 1]
    return MatricesAndRest([{"params": matrices, "by_row": True}, {"params": [p for p in params if p.dim() < 2]}])


def net_of(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def save_both_ways(folder: Path, make: Make, dtype: torch.dtype) -> None:
    for kind in ("sharded", "full"):
        strategy = FabricStrategy(bucket_size=100, state_dict_type=kind)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        net = net_of(13).to(dtype)
        model, optimizer = fabric.setup(net, make([*net.parameters()]))
        for step in range(2):
            fabric.backward(model(torch.full((4, 5), 1.0 + step, dtype=dtype)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(folder / kind, {"net": model, "optimizer": optimizer, "step": 2, "history": {"loss": [1.0, 2.0]}})


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (head_first, torch.float32),
        (head_first, torch.bfloat16),
        (adafactor, torch.float32),
        (KeepsNested, torch.float32),
        (matrices_and_rest, torch.bfloat16),
    ],
)
def test_state_converts_as_ranks_write_it(ranks: Ranks, tmp_path: Path, make: Make, dtype: torch.dtype) -> None:
    """Groups in another order, rows and columns, dictionaries, and shards beside whole ones."""
    ranks.run(save_both_ways, tmp_path, make, dtype)
    consolidate(tmp_path / "sharded", tmp_path / "file")
    saved = load(tmp_path / "full")
    assert_same_value(load(tmp_path / "file"), saved, "checkpoint")
    assert (MAIN_PARAMS_KEY in saved) == (dtype == torch.bfloat16)
    convert(read_file(tmp_path / "full"), names_from(tmp_path / "sharded"), tmp_path / "directory")
    assert_same_directories(tmp_path / "directory", tmp_path / "sharded")


# --- names -----------------------------------------------------------------------------------------------------------


def rename(groups: list[list[str]], old: str, new: str) -> list[list[str]]:
    return [[new if name == old else name for name in group] for group in groups]


def test_wrong_names_are_refused(file: Saved, directory: Saved, tmp_path: Path) -> None:
    whole = read_file(file.path)
    right = names_from(directory.path)["optimizer_0"]
    wrong = {
        "no JSON": "names.json is neither JSON nor a sharded directory",
        json.dumps(right): "expected a list of groups, each a list of parameter names, by optimizer",
        json.dumps({"optimizer_0": right[0] + right[2]}): "expected a list of groups",
        json.dumps({"optimizer_1": right}): "'optimizer_0' by number, and the directory needs parameter names",
        json.dumps(
            {"optimizer_0": right[:2]}
        ): r"has groups of \[2, 0, 9\] parameters, the names are groups of \[2, 0\]",
        json.dumps({"optimizer_0": rename(right, "norm.bias", "norm.weight")}): "a name is given to two parameters",
        json.dumps(
            {"optimizer_0": rename(right, "norm.bias", "norm.beta")}
        ): "cannot be 'norm.beta', which is not among",
    }
    for text, message in wrong.items():
        (tmp_path / "names.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            convert(whole, names_from(tmp_path / "names.json"), tmp_path / "sharded.ckpt")
        assert [path.name for path in tmp_path.iterdir()] == ["names.json"]
    (tmp_path / "names.json").write_text(json.dumps({"optimizer_0": right}))
    convert(whole, names_from(tmp_path / "names.json"), tmp_path / "sharded.ckpt")
    assert_same_directories(tmp_path / "sharded.ckpt", directory.path)


# --- what can go wrong -----------------------------------------------------------------------------------------------


def test_existing_path_stays_unless_forced(file: Saved, directory: Saved, tmp_path: Path) -> None:
    (tmp_path / "home" / "thesis").mkdir(parents=True)
    (tmp_path / "old").write_text("mine")
    whole, names = read_file(file.path), names_from(directory.path)
    for force in (False, True):
        with pytest.raises(CheckpointError, match=r"home is a directory, and no checkpoint"):
            consolidate(directory.path, tmp_path / "home", force=force)
        with pytest.raises(CheckpointError, match=r"home is a directory, and no checkpoint"):
            convert(whole, names, tmp_path / "home", force=force)
    with pytest.raises(CheckpointError, match=r"old is already there: --force replaces it"):
        consolidate(directory.path, tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"old is already there: --force replaces it"):
        convert(whole, names, tmp_path / "old")
    assert (tmp_path / "old").read_text() == "mine"
    convert(whole, names, tmp_path / "old", force=True)
    assert_same_directories(tmp_path / "old", directory.path)
    consolidate(tmp_path / "old", tmp_path / "old", force=True)  # in place, too
    assert_same_value(load(tmp_path / "old"), load(file.path), "checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "old"]
    assert (tmp_path / "home" / "thesis").is_dir()


@pytest.mark.parametrize("harm", ["cut off", "missing", "overwritten"])
def test_damaged_directory_is_refused(directory: Saved, tmp_path: Path, harm: str) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(directory.path, damaged)
    part = damaged / "__1_0.distcp"
    content = part.read_bytes()
    if harm == "cut off":
        part.write_bytes(content[:-1])
    elif harm == "missing":
        part.unlink()
    else:
        part.write_bytes(bytes(len(content)))
    messages = {
        "cut off": rf"damaged is not complete: __1_0.distcp is cut off after {len(content) - 1:,} of {len(content):,} ",
        "missing": r"damaged is not complete: __1_0.distcp is missing",
        "overwritten": "damaged cannot be read",
    }
    with pytest.raises(CheckpointError, match=messages[harm]):
        consolidate(damaged, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]
