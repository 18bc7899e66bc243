"""Tries the user's optimizer before it is sharded, and says why it cannot be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..engine import Engine
from ..errors import OptimizerNotShardableError
from ..trials import (
    CommunicationError,
    Findings,
    NotForShardsError,
    check_fp32_state,
    check_main_param_steps,
    no_communication,
)


def check_optimizer(optimizer: torch.optim.Optimizer, engine: Engine) -> Findings | None:
    """Tries the optimizer, and returns what trial steps showed; None if it is not to be sharded.

    Raises:
        OptimizerNotShardableError: if it cannot step what it would be given.
    """
    check_main_params(optimizer, engine)
    # Where every rank steps whole parameters it may be any optimizer; parts of tensor-parallel ones are no wholes.
    if engine.layout.num_shards == 1 and not engine.model_parallel.collectives:
        return None
    findings = engine.known_findings.probe(optimizer, engine.device, engine.layout.main_dtype)
    if findings.reason is not None:
        raise not_shardable(optimizer, engine, findings.reason)
    return findings


def check_main_params(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Raises OptimizerNotShardableError if it cannot step the fp32 main params that the model has."""
    dtypes = {spec.dtype for spec in engine.layout.params if spec.has_main_param}
    try:
        if dtypes and engine.layout.num_shards == 1:
            check_main_param_steps(optimizer)
        check_fp32_state(optimizer, dtypes)
    except NotForShardsError as reason:
        raise OptimizerNotShardableError(
            f"{type(optimizer).__name__} cannot step the fp32 main params of 16-bit weights: {reason}. Keep the "
            "weights in fp32 (autocast for the forward), or use another optimizer"
        ) from None


@contextlib.contextmanager
def sending_nothing(optimizer: torch.optim.Optimizer, engine: Engine, *, is_watched: bool) -> Iterator[None]:
    """The user's ``step`` may not communicate while this is open; looked at if its code may."""
    if not is_watched:
        yield
        return
    try:
        with no_communication():
            yield
    except CommunicationError as reason:
        raise not_shardable(optimizer, engine, str(reason)) from None


def not_shardable(optimizer: torch.optim.Optimizer, engine: Engine, reason: str) -> OptimizerNotShardableError:
    """The error for an optimizer that cannot step shards, or parts."""
    if engine.layout.num_shards == 1:
        return OptimizerNotShardableError(
            f"{type(optimizer).__name__} cannot step parts of tensor-parallel parameters: {reason}. Use an optimizer "
            "that updates every element by itself (AdamW, SGD)"
        )
    return OptimizerNotShardableError(
        f"{type(optimizer).__name__} cannot be sharded: {reason}. Pass {engine.all_reduce_option}: every rank then "
        "steps whole parameters, as under torch DDP"
    )
