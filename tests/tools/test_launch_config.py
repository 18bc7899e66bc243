"""``megastrategy launch``: what is refused before a script runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megastrategy.tools.commands import root


def run(*arguments: str) -> Result:
    return CliRunner().invoke(root, arguments)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError('it ran')")
    monkeypatch.chdir(tmp_path)


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
