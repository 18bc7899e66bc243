"""Finds the output of ``megastrategy checkpoint inspect`` without reading any tensor's data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import EXTRA_FILE
from .checkpoint_parts import Parts, read_directory_parts, read_file


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor.

    Attributes:
        section: the model's or optimizer's key in the checkpoint, or the key of something else.
        owner: the name of the parameter or buffer, or "#3" in an optimizer's state by number.
        what: "exp_avg", "main_param", ...; "" for the value itself.
        shape: of the whole tensor.
        dtype: as torch calls it.
        nbytes: of the whole tensor.
        shared_with: whose memory it shares in the file, as tied weights do; "" for its own.
    """

    section: str
    owner: str
    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    shared_with: str = ""


@dataclasses.dataclass(frozen=True)
class OptimizerContents:
    """An optimizer's state.

    Attributes:
        key: in the checkpoint.
        groups: the hyper-parameters, group by group, without the parameters.
        sizes: the number of parameters of each group.
        entries: its tensors; main params among them.
        has_names: whether they are known by parameter name rather than number.
    """

    key: str
    groups: list[dict[str, Any]]
    sizes: list[int]
    entries: list[Entry]
    has_names: bool


@dataclasses.dataclass(frozen=True)
class Contents:
    """Everything in a checkpoint.

    Attributes:
        parts: the checkpoint's parts.
        models: the entries of each model's weights and buffers.
        optimizers: in order.
        others: entries of tensors elsewhere, as in the states of callbacks.
        plain: everything else, by key: numbers and strings themselves, otherwise the type.
        disk_bytes: of the file, or of all files of the directory.
    """

    parts: Parts
    models: dict[str, list[Entry]]
    optimizers: list[OptimizerContents]
    others: list[Entry]
    plain: dict[str, str]
    disk_bytes: int

    @property
    def entries(self) -> list[Entry]:
        """All tensors."""
        models = [entry for entries in self.models.values() for entry in entries]
        return models + [entry for optimizer in self.optimizers for entry in optimizer.entries] + self.others

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors; those that share memory count once."""
        return sum(entry.nbytes for entry in self.entries if not entry.shared_with)


def inspect_checkpoint(path: Path, trust: bool = False) -> Contents:
    """Looks into a file or directory. Raises CheckpointError if it is none, is not complete, or needs ``trust``."""
    parts = read_directory_parts(path, trust) if path.is_dir() else read_file(path, trust)
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    # one for all parts: tensors of different parts may share memory, which the file has once
    seen: dict[int, str] = {}
    models = {key: list(_entries(key, model, seen)) for key, model in parts.models.items()}
    optimizers = [_optimizer(key, state, parts, seen) for key, state in parts.optimizers.items()]
    others = [entry for key, value in parts.extra.items() for entry in _entries(key, value, seen)]
    plain = {
        key: repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
        for key, value in parts.extra.items()
    }
    return Contents(parts, models, optimizers, others, plain, sum(file.stat().st_size for file in files))


def loads_with(contents: Contents) -> list[tuple[str, str]]:
    """Lists the programs that can load it, and how; also losses, and steps that have to come first."""
    parts = contents.parts
    is_file = parts.kind == "file"
    # bare weights or a bare optimizer state, which no strategy's resume finds under its keys
    if set(parts.models) == {""} or "" in parts.optimizers:
        target = "module" if parts.models else "optimizer"
        load = "torch.load(PATH)" if is_file else "the state that torch.distributed.checkpoint.load reads"
        return [("plain torch", f"{target}.load_state_dict({load}), before training")]
    resume = "trainer.fit(..., ckpt_path=PATH)" if parts.writer == "Trainer" else "fabric.load(PATH, state)"
    if not any(optimizer.groups for optimizer in contents.optimizers):
        resume += ", weights only: it holds no optimizer"
    if is_file:
        rounded = ", which goes on from the rounded weights: it has no use for main params" if parts.main_params else ""
        return [
            ('"megatron_ddp"', resume),
            ('"ddp", "auto"', resume + rounded),
            ("plain torch", "torch.load(PATH), and load_state_dict of its values" + rounded),
        ]
    # torch.distributed.checkpoint writes directories without it, which Lightning refuses
    if not (parts.path / EXTRA_FILE).is_file():
        resume = "not by a Trainer or Fabric, whose directories have a meta.pt"
    return [
        ('"megatron_ddp"', resume),
        ('"ddp", "auto", plain torch', "not a directory: megastrategy checkpoint consolidate PATH"),
    ]


def _optimizer(key: str, state: Mapping[str, Any], parts: Parts, seen: dict[int, str]) -> OptimizerContents:
    groups = state.get("param_groups", [])
    entries: list[Entry] = []
    for owner, values in state.get("state", {}).items():
        name = f"#{owner}" if isinstance(owner, int) else str(owner)
        entries += [dataclasses.replace(entry, owner=name, what=entry.owner) for entry in _entries(key, values, seen)]
    main_params = _entries(key, parts.main_params.get(key, {}), seen)
    entries += [dataclasses.replace(entry, what="main_param") for entry in main_params]
    has_names = any(isinstance(name, str) for group in groups for name in group["params"])
    hyper = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return OptimizerContents(key, hyper, [len(group["params"]) for group in groups], entries, has_names)


def _entries(section: str, value: Any, seen: dict[int, str], owner: str = "") -> Iterator[Entry]:
    """Yields the tensors anywhere in nested containers, each named by its way."""
    if isinstance(value, Tensor):
        shared_with = ""
        # tensors of directories have no memory to compare
        if value.device.type != "meta" and value.nbytes:
            place = value.data_ptr()  # not the storage: weights of a recurrent layer on CUDA share one, side by side
            shared_with = seen.get(place, "")
            seen.setdefault(place, owner or section)
        yield Entry(section, owner, "", tuple(value.shape), value.dtype, value.nbytes, shared_with)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entries(section, item, seen, f"{owner}.{key}" if owner else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _entries(section, item, seen, f"{owner}.{number}" if owner else str(number))
