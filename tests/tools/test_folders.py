"""``inspect`` on what accelerate and transformers leave: a folder of files, which is one checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from megastrategy.core import CheckpointError
from megastrategy.tools.commands import root
from megastrategy.tools.contents import inspect_checkpoint
from tests.doors.accelerate.test_accelerate_checkpoints import train_from
from tests.doors.accelerate_loops import Worlds
from tests.doors.fabric_loops import AwkwardNet
from tests.doors.transformers_fits import fit

from .conftest import Saved
from .test_inspection import text_of, verdicts


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    pools = Worlds()
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def states(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of ``save_state`` of a two-rank run, by kind."""
    folder = tmp_path_factory.mktemp("states")
    for name, plugin, options in [
        ("full", {}, {}),
        ("bin", {}, {"safe": False}),
        ("bf16", {}, {"dtype": torch.bfloat16}),
        ("sharded", {"state_dict_type": "sharded"}, {}),
    ]:
        worlds.run(train_from, "megatron_ddp", plugin, save=folder / name, **options)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["full", "bin", "sharded"])
def test_saved_state_is_inspected(states: dict[str, Path], kind: str) -> None:
    contents = inspect_checkpoint(states[kind])
    net = AwkwardNet()
    expected = {name: (tuple(value.shape), value.dtype) for name, value in net.state_dict().items()}
    [(key, entries)] = contents.models.items()
    assert key == "model"
    seen = {entry.owner: (entry.shape, entry.dtype) for entry in entries}
    if kind == "full":  # safetensors has a tied weight once, under one of its names
        missing = set(expected) - set(seen)
        assert len(missing) == 1
        expected = {name: item for name, item in expected.items() if name not in missing}
    assert seen == expected
    [optimizer] = contents.optimizers
    assert (optimizer.key, optimizer.has_names) == ("optimizer", kind == "sharded")
    assert optimizer.sizes == [len(list(net.parameters()))]
    assert {"exp_avg", "exp_avg_sq"} <= {entry.what for entry in optimizer.entries}
    assert {"scheduler.bin", "custom_checkpoint_0.pkl", "random_states_1.pkl"} <= set(contents.plain)
    assert contents.disk_bytes == sum(file.stat().st_size for file in states[kind].rglob("*") if file.is_file())
    report = text_of(contents)
    assert report.startswith(f"{states[kind]}: a folder, by Accelerator.save_state\n")
    assert "accelerator.load_state(PATH)" in report
    assert ("not a sharded one" in report) == (kind == "sharded")


def test_main_params_of_saved_state_are_told(states: dict[str, Path]) -> None:
    contents = inspect_checkpoint(states["bf16"])
    main_params = [entry for entry in contents.entries if entry.what == "main_param"]
    assert {entry.dtype for entry in main_params} == {torch.float32}
    trained = [param.numel() for param in AwkwardNet().parameters() if param.requires_grad]
    assert sum(entry.nbytes for entry in main_params) == 4 * sum(trained)
    assert "rounded weights" in verdicts(contents)["accelerate"]
    assert "rounded" not in verdicts(contents)["accelerate, with megastrategy's Accelerator"]


def test_folder_of_transformers_trainer(worlds: Worlds, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    worlds.run(fit, "megatron_ddp", {}, tmp_path, **options)
    path = tmp_path / "checkpoint-3"
    contents = inspect_checkpoint(path)
    assert list(contents.models) == ["model"]
    [optimizer] = contents.optimizers
    assert {"exp_avg", "exp_avg_sq"} <= {entry.what for entry in optimizer.entries}
    assert contents.parts.extra["global_step"] == 3
    report = text_of(contents)
    assert report.startswith(f"{path}: a folder, by transformers.Trainer\n")
    assert "global_step 3" in report
    assert "trainer.train(resume_from_checkpoint=PATH)" in report
    with pytest.raises(CheckpointError, match=f"Below it are .*{path}.*: inspect one of them"):
        inspect_checkpoint(tmp_path)


def test_folder_of_checkpoints_names_the_newest(
    directory: Saved, file: Saved, states: dict[str, Path], tmp_path: Path
) -> None:
    """As a Trainer's logger, and ``save_state`` with numbers, have them some folders down."""
    version = tmp_path / "logs" / "version_0"
    shutil.copytree(directory.path, version / "checkpoints" / "sharded.ckpt")
    shutil.copy(file.path, version / "checkpoints" / "whole.ckpt")
    shutil.copytree(states["sharded"], tmp_path / "checkpoint_0")
    saved_at = {
        "logs/version_0/checkpoints/whole.ckpt": 3,
        "checkpoint_0": 2,
        "logs/version_0/checkpoints/sharded.ckpt": 1,
    }
    for path, time_s in saved_at.items():
        os.utime(tmp_path / path, (time_s, time_s))
    result = CliRunner().invoke(root, ["checkpoint", "inspect", str(tmp_path)])
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert f"Below it are {', '.join(str(tmp_path / path) for path in saved_at)}: inspect one of them" in line
    for path in saved_at:
        assert inspect_checkpoint(tmp_path / path).models


def test_index_finds_weights_in_several_files(states: dict[str, Path], tmp_path: Path) -> None:
    """As transformers writes large models."""
    whole = inspect_checkpoint(states["full"])
    path = Path(shutil.copytree(states["full"], tmp_path / "parts"))
    names = [entry.owner for entry in whole.models["model"]]
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    parts = inspect_checkpoint(path)
    assert [dataclasses.astuple(entry) for entry in parts.models["model"]] == [
        dataclasses.astuple(entry) for entry in whole.models["model"]
    ]
