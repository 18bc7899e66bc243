"""Writes and reads the files of ``Accelerator.save_state`` beside accelerate's own, and instead of some of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from .._checkpoints.directory_writer import save_directory
from .._checkpoints.files import load_file, save_file
from .._checkpoints.not_tensors import NOT_TENSORS, not_tensors
from ..core import (
    EXTRA_FILE,
    CheckpointError,
    Collectives,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    NotOnAllRanksError,
    OpenDirectory,
    SingleRankCollectives,
    is_directory_checkpoint,
)
from .prepared_model import PreparedModel

_CALL_ON_ALL_RANKS = (
    "Move accelerator.save_state(...) out of `if accelerator.is_main_process:`: every rank calls it, and the main "
    "process writes. Or leave the script as it is, and keep the whole optimizer on every rank: "
    "`use_distributed_optimizer: false`, with `state_dict_type: full`, in the YAML file of -m megastrategy.launch, or "
    "as arguments of MegatronDDPPlugin"
)

MAIN_PARAMS_FILE = "megatron_ddp_main_params.bin"
"""Holds, by the optimizer's number, its full fp32 main params by parameter name."""

DIRECTORY = "megatron_ddp"
"""Holds, with ``state_dict_type="sharded"``, weights and sharded optimizers for torch.distributed.checkpoint, under
``model``, ``model_1``, ..., ``optimizer``, ``optimizer_1``, ..., as accelerate numbers its files."""


@contextlib.contextmanager
def on_all_ranks(collectives: Collectives | None) -> Iterator[None]:
    """Enters a save when all ranks have come to it; its errors contain the change to make in the script."""
    try:
        if collectives is not None:
            collectives.require_all_ranks("accelerator.save_state()", _CALL_ON_ALL_RANKS)
        yield
    except NotOnAllRanksError as error:
        # from inside of the save: tensor ranks, or stages, that are elsewhere
        if _CALL_ON_ALL_RANKS in str(error):
            raise
        raise NotOnAllRanksError(f"in accelerator.save_state(): {error}\n{_CALL_ON_ALL_RANKS}") from error


def save_main_params(folder: Path, optimizers: Sequence[DistributedOptimizer | None], writes: bool) -> None:
    """Gathers and writes fp32 main params; ``writes`` says whether this rank has a file to write.

    Collective if any of the optimizers has main params.
    """
    gathered = {number: item.main_params() for number, item in enumerate(optimizers) if item is not None}
    main_params = {number: params for number, params in gathered.items() if params}
    if writes and main_params:
        save_file(main_params, folder / MAIN_PARAMS_FILE)


def load_main_params(folder: Path, optimizers: Sequence[DistributedOptimizer | None]) -> None:
    """Loads fp32 main params. Call it after the weights were loaded: where one is not the rounding of its main param,
    the weight wins. Collective; a rank whose node has no file gets rank 0's."""
    path = folder / MAIN_PARAMS_FILE
    saved = load_file(path, weights_only=True) if path.is_file() else {}
    for number, item in enumerate(optimizers):
        if item is not None:
            item.load_main_params(saved.get(number, {}))


def is_sharded(folder: Path) -> bool:
    """Whether weights and optimizers are in the directory of :func:`save_sharded`."""
    return is_directory_checkpoint(folder / DIRECTORY)


def save_sharded(
    folder: Path,
    weights: Sequence[dict[str, Any]],
    optimizers: Sequence[DistributedOptimizer],
    collectives: Collectives,
) -> None:
    """Writes a directory: every rank its part of shared tensors, and the tensors that only it has. Collective. Raises
    CheckpointError on all ranks if any of them could not write."""
    state: dict[str, Any] = {_key("model", number): values for number, values in enumerate(weights)}
    extra = not_tensors(state)
    state |= {_key("optimizer", number): item.sharded_state_dict() for number, item in enumerate(optimizers)}
    save_directory(state, extra, folder / DIRECTORY, collectives)


def load_sharded(folder: Path, models: Sequence[Module], optimizers: Sequence[DistributedOptimizer]) -> None:
    """Loads a directory: each rank reads the weights, and its part of the optimizers.

    Raises:
        CheckpointError: if a key is missing, or an optimizer is of another model; nothing is changed then.
    """
    path = folder / DIRECTORY
    directory = OpenDirectory(path)
    keys = [_key("model", number) for number in range(len(models))]
    optimizer_keys = [_key("optimizer", number) for number in range(len(optimizers))]
    # everything is checked before the first model is changed
    missing = [key for key in keys + optimizer_keys if key not in directory.keys]
    if missing:
        raise CheckpointError(f"{path} has no {missing[0]!r}, only {sorted(directory.keys)}")
    # of a module the values that torch.load accepts by default: tensors, numbers, text and their containers
    not_tensors = load_file(path / EXTRA_FILE, weights_only=True).get(NOT_TENSORS, {})
    weights = [
        directory.read_weights(key, model) | not_tensors.get(key, {}) for key, model in zip(keys, models, strict=True)
    ]
    read = [item.read_sharded(directory, key) for item, key in zip(optimizers, optimizer_keys, strict=True)]
    for model, values in zip(models, weights, strict=True):
        model.load_state_dict(values)
    for apply in read:  # after the weights, whose rounded values would otherwise replace the main params
        apply()


@contextlib.contextmanager
def loading(
    prepared: Sequence[Any], models: Sequence[Module], in_one_process: DistributedDataParallelConfig | None
) -> Iterator[list[DistributedOptimizer]]:
    """Yields those of these optimizers that a directory has.

    Where torch's own are stepped, in one process, they get an engine to load it, with these options.
    """
    found = []
    made = []
    for item in prepared:
        known = sharded_inside(item)
        # a directory has state by parameter name: only a model can say which number of torch's each is
        if known is None and in_one_process is not None:
            params = {id(param) for group in item.param_groups for param in group["params"]}
            owner = [model for model in models if params <= {id(param) for param in model.parameters()}]
            if not owner:
                raise ValueError(
                    "a directory has the optimizers of one model each, and here one has parameters of several"
                )
            made.append(PreparedModel(owner[0], in_one_process, collectives=SingleRankCollectives()))
            known = DistributedOptimizer(item.optimizer, made[-1])
        found += [known] if known is not None else []
    try:
        yield found
    finally:
        for model in made:
            model.close()


def sharded_inside(optimizer: Any) -> DistributedOptimizer | None:
    """Returns the sharded optimizer inside of accelerate's, or None."""
    inner = optimizer if isinstance(optimizer, DistributedOptimizer) else getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, DistributedOptimizer) else None


def copy_to_nodes(folder: Path, optimizers: Sequence[DistributedOptimizer | None], writes: bool) -> None:
    """Gives every node rank 0's files of the sharded optimizers, since no other rank has their full state. Collective.

    ``writes`` says whether this rank saves for its node.
    """
    rank = torch.distributed.get_rank()
    names = [f"{_key('optimizer', number)}.bin" for number, item in enumerate(optimizers) if item is not None]
    for name in [*names, MAIN_PARAMS_FILE]:
        path = folder / name
        # all ranks take part for every name, since only rank 0 knows which files it wrote
        content = [path.read_bytes() if rank == 0 and path.is_file() else None]
        torch.distributed.broadcast_object_list(content, src=0)
        if writes and rank != 0 and content[0] is not None:
            path.write_bytes(content[0])


def latest(folder: Path) -> Path | None:
    """Returns the last of the checkpoints that accelerate numbered; None if there are none."""
    paths = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        numbers = re.findall(r"\d+", path.name)
        if numbers:
            paths[int(numbers[-1])] = path
    return paths[max(paths)] if paths else None


def _key(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"
