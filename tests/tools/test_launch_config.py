"""``megastrategy config`` and ``megastrategy launch``: what is asked and written, and what accelerate gets of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from click.testing import CliRunner, Result

from megastrategy.accelerate.launch_config import plugin_from_launch
from megastrategy.accelerate.plugin import MegatronDDPPlugin
from megastrategy.tools import launching
from megastrategy.tools.commands import root


def run(*arguments: str, answers: str = "") -> Result:
    return CliRunner().invoke(root, arguments, input=answers)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError('it ran')")
    monkeypatch.chdir(tmp_path)


def as_accelerate_reads(path: Path) -> Any:
    """Its own reading of the file without our part."""
    theirs, has_section = launching._split(path)
    assert has_section
    file = launching._write(theirs, path.with_suffix(".theirs.yaml"))
    return _validate_launch_command(launch_command_parser().parse_args(["--config_file", file, "train.py"]))[0]


def test_answers_become_one_file_that_accelerate_and_we_read() -> None:
    result = run("config", answers="2\ny\nbf16\nn\n1000\nn\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith("megastrategy launch --config_file megatron_ddp.yaml train.py")
    path = Path("megatron_ddp.yaml")
    assert plugin_from_launch(path, {}) == MegatronDDPPlugin(
        use_distributed_optimizer=False, bucket_size=1000, grad_reduce_in_fp32=False
    )
    read = as_accelerate_reads(path)
    assert (read.num_processes, read.multi_gpu, read.use_cpu, read.mixed_precision) == (2, True, True, "bf16")
    assert read.main_process_port == 0, "any port that is free"


def test_the_defaults_are_one_process_and_our_defaults() -> None:
    assert run("config", "--config_file", "a.yaml", answers="\n" * 6).exit_code == 0
    assert plugin_from_launch(Path("a.yaml"), {}) == MegatronDDPPlugin()
    read = as_accelerate_reads(Path("a.yaml"))
    assert (read.num_processes, read.multi_gpu, read.use_cpu, read.mixed_precision) == (1, False, False, "no")


def test_a_file_that_is_there_is_kept_unless_forced() -> None:
    path = Path("megatron_ddp.yaml")
    path.write_text("mine")
    result = run("config", answers="\n" * 6)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: megatron_ddp.yaml is there already: --force replaces it\n"
    assert path.read_text() == "mine"
    assert run("config", "--force", answers="\n" * 6).exit_code == 0
    assert path.read_text() != "mine"


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
def test_what_cannot_be_launched_is_one_line_and_exit_code_2(
    content: str | None, arguments: list[str], message: str
) -> None:
    if content is not None:
        Path("one.yaml").write_text(content)
    result = run("launch", *arguments, "--config_file", "one.yaml", "train.py")
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert message in line
