"""Folders that ``Accelerator.save_state`` and ``transformers.Trainer`` leave: several files that are one checkpoint.

The weights are found by the names of their files. Files of random state and of training arguments contain objects:
they are listed by name and size.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core import CheckpointError, is_directory_checkpoint
from .checkpoint_parts import MAIN_PARAMS_KEY, Parts, read_directory_parts, read_object
from .foreign_paths import describe_file, describe_folder

SHARDED = "megatron_ddp"
"""The directory in the folder that ``state_dict_type="sharded"`` puts in place of weights and optimizers."""

_WEIGHTS = re.compile(r"(?:model|pytorch_model|adapter_model)(?:_(\d+))?\.(?:safetensors|bin)(?:\.index\.json)?")
_OPTIMIZER = re.compile(r"optimizer(?:_(\d+))?\.(?:bin|pt)")
_MAIN_PARAMS = f"{MAIN_PARAMS_KEY}.bin"
_TRAINER = "trainer_state.json"


@dataclasses.dataclass(frozen=True)
class SavedFile:
    """A file that is not looked into."""

    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes:,} bytes"


def read_folder(path: Path, trust: bool = False) -> Parts:
    """The parts of a folder, under the keys that its sharded directory would have.

    Raises:
        CheckpointError: if there are neither weights nor an optimizer in it, with the checkpoints that it has below;
            if a file is broken, or needs ``trust``.
    """
    parts = Parts(path, "folder", "transformers" if (path / _TRAINER).is_file() else "accelerate")
    # the loop below adds to it what hooks saved in files beside it
    if is_directory_checkpoint(path / SHARDED):
        inner = read_directory_parts(path / SHARDED, trust)
        parts.models = inner.models
        parts.optimizers = inner.optimizers
        parts.main_params = inner.main_params
    main_params: Mapping[int, Mapping[str, Tensor]] = {}
    for file in sorted(path.iterdir()):
        if not file.is_file():
            continue
        weights_match = _WEIGHTS.fullmatch(file.name)
        optimizer_match = _OPTIMIZER.fullmatch(file.name)
        if weights_match:
            parts.models[_key("model", weights_match[1])] = _weights(file, trust)
        elif optimizer_match:
            parts.optimizers[_key("optimizer", optimizer_match[1])] = _optimizer(file, trust)
        elif file.name == _MAIN_PARAMS:
            main_params = read_object(file, trust)
        else:
            parts.extra[file.name] = SavedFile(file.stat().st_size)
    # named as a broken directory, which it is after an interrupted save; else a folder below is meant
    if not parts.models and not parts.optimizers:
        what = describe_folder(path) or (
            f"is no complete sharded checkpoint: it has no .metadata, which is written last{_below(path)}"
        )
        raise CheckpointError(f"{path} {what}")
    parts.main_params |= {_key("optimizer", str(number or "")): params for number, params in main_params.items()}
    if parts.writer == "transformers":
        state = _json(path / _TRAINER)
        parts.extra |= {key: state[key] for key in ("epoch", "global_step") if key in state}
    return parts


def read_weights_file(path: Path) -> Parts:
    """The parts of a safetensors file, or of the index of several files in one folder. Raises CheckpointError if a file
    is broken or missing."""
    is_index = path.name.endswith(".index.json")
    weights = _weights(path, trust=False) if is_index else _mapped(path)
    return Parts(path, "file", "safetensors", models={"": weights})


def _key(kind: str, number: str | None) -> str:
    return f"{kind}_{number}" if number else kind


def _weights(file: Path, trust: bool) -> Mapping[str, Any]:
    if file.name.endswith(".index.json"):
        names = dict.fromkeys(_json(file).get("weight_map", {}).values())
        missing = [part for part in names if not (file.parent / part).is_file()]
        if missing:
            raise CheckpointError(f"{file} names {missing[0]}, which is not there: download or copy it, too")
        return {name: value for part in names for name, value in _weights(file.parent / part, trust).items()}
    content = _mapped(file) if file.suffix == ".safetensors" else read_object(file, trust)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not weights by name")
    return content


def _optimizer(file: Path, trust: bool) -> dict[str, Any]:
    content = read_object(file, trust)
    if not isinstance(content, Mapping) or not isinstance(content.get("param_groups"), list):
        raise CheckpointError(f"{file} is no state of an optimizer, of parameter groups and their state")
    return dict(content)


def _mapped(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file. Their data is mapped, and not read."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f"{file} is a file of safetensors: pip install safetensors to read it") from error
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except SafetensorError as error:
        what = describe_file(file) or f"is no file of safetensors, or is cut off: {error}"
        raise CheckpointError(f"{file} {what}") from error
    return tensors


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, where keys are expected")
    return content


def _below(path: Path) -> str:
    """Names the newest checkpoints somewhere in the folder, as a logger and a run with many saves leave them."""
    checkpoints = {file for file in path.rglob("*.ckpt") if file.is_file()}
    checkpoints |= {file.parent for file in path.rglob(".metadata")}
    for file in path.rglob("*"):
        if file.is_file() and (_WEIGHTS.fullmatch(file.name) or _OPTIMIZER.fullmatch(file.name)):
            checkpoints.add(file.parent)
    # such a directory is a part of its folder, and the folder is loaded
    checkpoints = {item.parent if item.name == SHARDED else item for item in checkpoints} - {path}
    if not checkpoints:
        return ""
    newest = sorted(checkpoints, key=lambda item: item.stat().st_mtime, reverse=True)
    more = f", and {len(newest) - 3} more" if len(newest) > 3 else ""
    return f". Below it are {', '.join(map(str, newest[:3]))}{more}: inspect one of them"
