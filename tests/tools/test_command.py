"""The ``megastrategy`` command: what it says, where, and with which exit code."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

import megastrategy
from megastrategy.core import is_directory_checkpoint
from megastrategy.tools.commands import root
from megastrategy.tools.conversion import names_from

from .conftest import Saved

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(root, ["checkpoint", *map(str, arguments)])


def succeeds(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*arguments: object, code: int = 1) -> str:
    """The error: one line without a traceback, on stderr."""
    result = run(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    if code == 1:
        assert len(result.stderr.splitlines()) == 1
    return result.stderr


def test_console_script_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["megastrategy"].partition(":")
    assert getattr(importlib.import_module(module), name) is root
    assert {requirement.split(">")[0] for requirement in project["dependencies"]} == {"torch", "click", "rich"}


def test_shell_completes_commands() -> None:
    environment = {
        **os.environ,
        "_MEGASTRATEGY_COMPLETE": "bash_complete",
        "COMP_WORDS": "megastrategy p",
        "COMP_CWORD": "1",
    }
    code = "from megastrategy.tools.commands import root; root(prog_name='megastrategy')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["plain,plan", "plain,profile"]


def test_help_imports_no_torch() -> None:
    """Nor what a command needs to run: a shell's completion asks for it, too."""
    code = (
        "import sys; from megastrategy.tools.commands import root; root(['--help'], standalone_mode=False); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'rich', 'lightning')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n"), done.stdout


class Hides:
    """An importer that finds a package to be not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=self.name)


def test_help_and_version() -> None:
    assert CliRunner().invoke(root, ["--version"]).stdout == f"megastrategy, version {megastrategy.__version__}\n"
    assert "checkpoint" in CliRunner().invoke(root, ["-h"]).stdout
    assert isinstance(root, click.Group)
    for command in ("inspect", "convert", "consolidate"):
        assert "--trust" in succeeds(command, "--help")


def test_commands_convert_and_inspect(directory: Saved, file: Saved, tmp_path: Path) -> None:
    """stdout is what was written, for scripts; progress would be on stderr of a terminal."""
    whole, again = tmp_path / "whole.ckpt", tmp_path / "again.ckpt"
    assert succeeds("consolidate", directory.path, whole) == f"{whole}\n"
    assert torch.load(whole)["global_step"] == 7
    assert succeeds("convert", whole, again, "--names", directory.path) == f"{again}\n"
    assert is_directory_checkpoint(again)
    (tmp_path / "names.json").write_text(json.dumps(names_from(again)))
    assert "already there: --force" in fails("convert", whole, again, "--names", tmp_path / "names.json")
    succeeds("convert", whole, again, "--names", tmp_path / "names.json", "--force")
    reports = [succeeds("inspect", path, "--all") for path in (whole, file.path, again, directory.path)]
    assert all("max_exp_avg_sq" in report for report in reports)
    assert len(succeeds("inspect", whole)) < len(succeeds("inspect", whole, "--depth", "2")) < len(reports[0])
    assert {path.name for path in tmp_path.iterdir()} == {"whole.ckpt", "again.ckpt", "names.json"}


def test_failure_is_one_line_with_the_remedy(directory: Saved, file: Saved, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    assert f"'{tmp_path}/nothing' does not exist" in fails("inspect", tmp_path / "nothing", code=2)
    assert f"{tmp_path}/text is no checkpoint" in fails("inspect", tmp_path / "text")
    assert f"{tmp_path}/empty is no complete sharded checkpoint" in fails("consolidate", tmp_path / "empty", out)
    assert "say --names FILE" in fails("convert", file.path, out)
    assert f"{tmp_path}/text/out" in fails("convert", file.path, tmp_path / "text" / "out", "--names", directory.path)
    assert f"{tmp_path}/text/out: the checkpoint was not saved" in fails(
        "consolidate", directory.path, tmp_path / "text" / "out"
    )
    assert "is a file" in fails("consolidate", file.path, out, code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "text"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"optimizer_states": None}, "'optimizer_states' is a NoneType, and a Trainer's file has a list of states"),
        ({"optimizer_states": "x"}, "'optimizer_states' is a str, and a Trainer's file has a list of states"),
        ({"optimizer_states": [7]}, "optimizer_0 is no state of an optimizer"),
        ({"optimizer_states": [{"state": None, "param_groups": []}]}, "optimizer_0 is no state of an optimizer"),
        ({"optimizer_states": [{"state": {}, "param_groups": [{"lr": 1.0}]}]}, "optimizer_0 is no state"),
        ({"state_dict": [1, 2]}, "a Trainer's file has"),
    ],
)
def test_foreign_content_is_refused_in_one_line(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = tmp_path / "foreign.ckpt"
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": {}, **content}, path)
    assert message in fails("inspect", path)


def test_file_of_other_state_is_not_converted(tmp_path: Path) -> None:
    """Whoever wrote it: a file without Lightning's version, too."""
    path = tmp_path / "foreign.ckpt"
    torch.save({"state_dict": {"weight": torch.ones(2)}, "optimizer_states": "x"}, path)
    assert "'optimizer_states' is a str" in fails("convert", path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- launch: what is refused before a script runs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "one.yaml: No such file or directory"),
        ("megatron_ddp_config: {buckt_size: 3}", [], "did you mean 'bucket_size'?"),
        ("megatron_ddp_config: {}", ["--no_python"], "--no_python: the launcher runs Python scripts"),
        ("[]", [], "one.yaml: expected keys"),
        ("distributed_type: 'NO'\nuse_cpus: true", [], "one.yaml: unknown key 'use_cpus': did you mean 'use_cpu'?"),
        (
            "megatron_ddp_confg: {}",
            [],
            "one.yaml: unknown key 'megatron_ddp_confg': did you mean 'megatron_ddp_config'?",
        ),
        ("colour: red", [], "one.yaml: unknown key 'colour', neither accelerate's nor megatron_ddp_config"),
        ("num_processes: 2", [], "accelerate: A `distributed_type` must be specified"),
        ("distributed_type: MULTI_GPUS", [], "accelerate: 'MULTI_GPUS' is not a valid DistributedType"),
        ("distributed_type: DEEPSPEED", [], "one.yaml: distributed_type: DEEPSPEED: a model is trained by one engine"),
        ("distributed_type: FSDP\nmegatron_ddp_config: {}", [], "one.yaml: distributed_type: FSDP: a model is trained"),
        ("distributed_type: MEGATRON_LM", [], "one.yaml: distributed_type: MEGATRON_LM: a model is trained"),
        ("distributed_type: 'NO'", ["--use_deepspeed"], "--use_deepspeed: a model is trained by one engine"),
        ("distributed_type: 'NO'", ["--use_fsdp"], "--use_fsdp: a model is trained by one engine"),
    ],
)
def test_wrong_launch_is_one_line(
    content: str | None, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise AssertionError('it ran')")
    if content is not None:
        Path("one.yaml").write_text(content)
    result = CliRunner().invoke(root, ["launch", *arguments, "--config_file", "one.yaml", "train.py"])
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert message in line
