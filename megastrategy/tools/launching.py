"""Splits a file with accelerate's keys and ours for ``accelerate launch``."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..accelerate.launch_config import SECTION, LaunchConfigError, plugin_from_launch, read_config_file

LAUNCHER = "megastrategy.launch"


_ANOTHER_ENGINE = (
    "a model is trained by one engine, and this launches megastrategy's. Leave it out (distributed_type: MULTI_GPU, on "
    "CPUs too), or use accelerate launch"
)


def launch(arguments: Sequence[str]) -> None:
    """Runs ``accelerate launch`` with these arguments, the script under :mod:`megastrategy.launch`.

    Accelerate refuses a file with keys that it does not know, so it gets one without ours; the launcher reads ours from
    the file itself.

    Raises:
        LaunchConfigError: if the file cannot be read, or has options of ours that cannot be.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser

    parsed = launch_command_parser().parse_args(list(arguments))
    # the script runs under a Python module of ours, so it must be Python
    if parsed.no_python:
        raise LaunchConfigError("--no_python: the launcher runs Python scripts and modules (-m)")
    for name in ("use_deepspeed", "use_fsdp", "use_megatron_lm"):
        if getattr(parsed, name):
            raise LaunchConfigError(f"--{name}: {_ANOTHER_ENGINE}")
    ours = Path(parsed.config_file) if parsed.config_file else None
    accelerate_keys, has_section = _split(ours) if ours else ({}, False)
    if ours:
        _check_keys(ours, accelerate_keys)
    config = ours if has_section else None
    # the error of every rank
    plugin_from_launch(config, os.environ)
    _check_target(parsed.training_script, is_module=parsed.module)
    # the user's command becomes arguments of our launcher, which accelerate starts as a module
    parsed.training_script_args = [
        *(["--config", str(config)] if config else []),
        *(["-m"] if parsed.module else []),
        parsed.training_script,
        *parsed.training_script_args,
    ]
    parsed.module = True
    parsed.training_script = LAUNCHER
    starts_several_on_cpu = parsed.cpu and (parsed.num_processes or 1) > 1 and not parsed.mpirun_hostfile
    if starts_several_on_cpu:
        # accelerate would start one process without a word; its launcher for GPUs starts several on any device
        parsed.cpu = False
        parsed.multi_gpu = True
    if starts_several_on_cpu or accelerate_keys.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"  # accelerate itself says so to one process alone, not to several
    with tempfile.TemporaryDirectory() as folder:
        parsed.config_file = _write(accelerate_keys, Path(folder) / "accelerate.yaml") if accelerate_keys else None
        try:
            launch_command(parsed)
        except ValueError as error:  # accelerate's; a script runs in processes of its own
            raise LaunchConfigError(f"accelerate: {error}") from error


def _check_target(target: str, *, is_module: bool) -> None:
    """Checks here, with an error of one line, what the launcher would check on every rank."""
    if not is_module:
        if not os.path.exists(target):
            raise LaunchConfigError(f"the script {target} does not exist (in {os.getcwd()})")
        return
    top = target.partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])  # where python -m looks first
    if here is None and importlib.util.find_spec(top) is None:
        raise LaunchConfigError(f"there is no module {target}")


def _split(path: Path) -> tuple[dict[str, Any], bool]:
    """Returns accelerate's part of the file, and whether there is one of ours."""
    content = read_config_file(path)
    return {key: value for key, value in content.items() if key != SECTION}, SECTION in content


def _check_keys(path: Path, theirs: Mapping[str, Any]) -> None:
    """Refuses unknown keys. Accelerate would name the file that it was given, not the user's, and no nearest name."""
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    kind = SageMakerConfig if theirs.get("compute_environment") == "AMAZON_SAGEMAKER" else ClusterConfig
    known_names = [SECTION, "fp16", "dynamo_backend", *kind.__dataclass_fields__]  # the two are older names
    for key in map(str, theirs):
        if key not in known_names:
            near = difflib.get_close_matches(key, known_names, n=1)
            hint = f": did you mean {near[0]!r}?" if near else f", neither accelerate's nor {SECTION}"
            raise LaunchConfigError(f"{path}: unknown key {key!r}{hint}")
    # in the file it means the same as on the command line, which was asked before
    if theirs.get("distributed_type") in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise LaunchConfigError(f"{path}: distributed_type: {theirs['distributed_type']}: {_ANOTHER_ENGINE}")


def _write(content: dict[str, Any], path: Path) -> str:
    import yaml  # type: ignore[import-untyped]

    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return str(path)
