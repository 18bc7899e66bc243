"""Checks that the user's optimizer can be sharded, and makes the errors if it cannot."""

from __future__ import annotations

import torch

from ..data_path import Engine
from ..errors import OptimizerNotShardableError
from ..judge import (
    GroupClasses,
    NotClassifiedError,
    Sharding,
    check_main_param_steps,
    sharding_of,
)


def check_optimizer(optimizer: torch.optim.Optimizer, engine: Engine, sharding: Sharding) -> GroupClasses | None:
    """Returns how its groups are divided; None if the optimizer is not to be sharded.

    Raises:
        OptimizerNotShardableError: if it cannot step shards, parts, main params or dense gradients.
        ValueError: for an unknown word in ``sharding``, also where nothing is divided, as on one rank.
    """
    for group in optimizer.param_groups:
        sharding_of(group, sharding)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerNotShardableError(
            "SparseAdam steps sparse gradients only, and here gradients are dense, sharded or not: sparse ones are "
            "summed in a dense buffer. Use torch.optim.Adam or AdamW for these parameters, which step nn.Embedding "
            "with sparse=True or False here, rows without a gradient too; or keep SparseAdam under torch DDP"
        )
    check_main_params(optimizer, engine)
    # Any optimizer can step full parameters; the parts of tensor-parallel parameters are not full ones.
    if engine.layout.num_shards == 1 and not engine.model_parallel.collectives:
        return None
    try:
        return GroupClasses(optimizer, engine.device, engine.layout.main_dtype, sharding)
    except NotClassifiedError as reason:
        raise not_shardable(optimizer, engine, str(reason)) from None


def check_main_params(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Raises OptimizerNotShardableError if it cannot step the fp32 main params of whole weights."""
    if engine.layout.num_shards > 1 or not any(spec.has_main_param for spec in engine.layout.params):
        return
    try:
        check_main_param_steps(optimizer)
    except NotClassifiedError as reason:
        raise OptimizerNotShardableError(
            f"{type(optimizer).__name__} cannot step the fp32 main params of 16-bit weights: {reason}. Keep the "
            "weights in fp32 (autocast for the forward), or use another optimizer"
        ) from None


def not_shardable(optimizer: torch.optim.Optimizer, engine: Engine, reason: str) -> OptimizerNotShardableError:
    """Returns the error for an optimizer that cannot step shards, or parts of parameters."""
    if engine.layout.num_shards == 1:
        return OptimizerNotShardableError(
            f"{type(optimizer).__name__} cannot step parts of tensor-parallel parameters: {reason}. Use an optimizer "
            "that updates every element by itself (AdamW, SGD)"
        )
    return OptimizerNotShardableError(
        f"{type(optimizer).__name__} cannot be sharded: {reason}. Pass {engine.all_reduce_option}: every rank then "
        "steps whole parameters, as under torch DDP. If you know better, say how a group is divided with an entry "
        "sharding='flat', 'whole' or 'replicated' (each rank steps all of it)"
    )
