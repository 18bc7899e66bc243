"""Contents of a Trainer's checkpoints: weights, states of optimizers, and main params beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from .._checkpoints.directories import OptimizerInDirectory, load_optimizers, written_by
from .._checkpoints.files import trainable_weights, unmapped_copy
from .._checkpoints.foreign import describe_value
from .._checkpoints.not_tensors import MAIN_PARAMS_KEY
from ..core import CheckpointError, DistributedOptimizer, Engine
from .checkpoint_io import CompleteFileIO
from .meshes import ModelMesh

LEFT_BEHIND = "fp32 main params of 'megatron_ddp': without it training goes on from the 16-bit weights"
"""Key beside the callbacks' states. Lightning warns of states without a callback, so "ddp" says what it loses."""


def add_main_params(checkpoint: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
    """Adds the fp32 main params under a key of their own, which "ddp" ignores. Collective."""
    main_params = [opt.main_params() if isinstance(opt, DistributedOptimizer) else {} for opt in optimizers]
    if any(main_params):
        checkpoint[MAIN_PARAMS_KEY] = main_params
        checkpoint.setdefault("callbacks", {})[LEFT_BEHIND] = {}


def check_directory_io(io: object, in_background: bool) -> None:
    """Raises ValueError for a user's ``CheckpointIO``, which writes no directories."""
    if not (in_background or io is None or isinstance(io, CompleteFileIO)):
        raise ValueError(
            f"state_dict_type='sharded' does not save through a CheckpointIO, but the Trainer has the plugin "
            f"{type(io).__name__}: leave it out, or choose state_dict_type='full'"
        )


def take_tensors(checkpoint: dict[str, Any], module: Module, mesh: ModelMesh, rank: int) -> dict[str, Any]:
    """Takes the weights and optimizer states that this rank writes into a directory out of a checkpoint. Collective."""
    weights = checkpoint.pop("state_dict")
    states = checkpoint.pop("optimizer_states", [])
    checkpoint |= mesh.not_tensors({"model": weights})
    tensors = {"model": written_by(weights, module, mesh.is_first_replica(rank))}
    return tensors | {f"optimizer_{number}": state for number, state in enumerate(states)}


def unmapped(checkpoint: Any, path: str | Path) -> dict[str, Any]:
    """Leaves weights and states in the mapped file, and copies the rest, which callbacks and hooks may keep, to memory
    of its own.

    Raises:
        CheckpointError: if the file is not a Trainer's.
    """
    if not isinstance(checkpoint, dict) or not {"state_dict", "pytorch-lightning_version"} & set(checkpoint):
        raise CheckpointError(
            f"{path} is no checkpoint of a Trainer: expected a dictionary with 'state_dict', got "
            f"{describe_value(checkpoint)}. Bare weights are loaded by module.load_state_dict, before the fit"
        )
    checkpoint.get("callbacks", {}).pop(LEFT_BEHIND, None)
    mapped = {"state_dict", "optimizer_states", MAIN_PARAMS_KEY}
    return {key: value if key in mapped else unmapped_copy(value) for key, value in checkpoint.items()}


def load_optimizer_states(
    checkpoint: Mapping[str, Any],
    module: Module,
    optimizers: Sequence[Optimizer],
    engine: Engine | None,
    lightnings: Callable[[dict[str, Any]], None],
) -> None:
    """Loads all optimizers' states. ``lightnings`` is Lightning's own function, for states in one file.

    Raises:
        CheckpointError: if one does not fit; those before it are loaded, as under "ddp".
    """
    states = checkpoint["optimizer_states"]
    # a file without main params may have fp32 weights, which the cast to 16 bits rounded
    weights = trainable_weights(module, checkpoint["state_dict"])
    if any(isinstance(state, OptimizerInDirectory) for state in states):
        load_optimizers(optimizers, states, weights)
        return
    sharded = [opt if isinstance(opt, DistributedOptimizer) else None for opt in optimizers]
    with contextlib.ExitStack() as stack:
        for optimizer in sharded:
            # Nothing is exchanged: the learning rate finder restores on a rank that has failed, and no other comes.
            if optimizer is not None:
                stack.enter_context(optimizer.every_rank_has_state())
        if engine is not None and engine.layout.offloads_state:  # Lightning would move it to the device
            for user_optimizer, state in zip(optimizers, states, strict=False):
                user_optimizer.load_state_dict(state)
        else:
            # shards are copied out of the mapped file; an unsharded optimizer keeps tensors, which must not be mapped
            is_cut = engine is not None and engine.layout.num_shards > 1
            lightnings({**checkpoint, "optimizer_states": states if is_cut else unmapped_copy(states)})
        saved = checkpoint.get(MAIN_PARAMS_KEY, [weights] * len(optimizers))
        for optimizer, main_params in zip(sharded, saved, strict=False):
            if optimizer is not None:
                optimizer.load_main_params(main_params)
