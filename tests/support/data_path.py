"""Which of the two data paths runs, while both exist, and what tests read of either."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from megastrategy.core.layout.owners import Owners

NEW = os.environ.get("MEGASTRATEGY_DATA_PATH") != "old"


def buffers_of(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the flat tensors of a sharded model's weights and gradients."""
    engine = model.engine
    if NEW:
        return engine.reducer.memory.weights.flats, engine.reducer.memory.grads
    return engine.param_buffers.flats, engine.grad_buffers.flats


def grads_of(model: Any) -> list[Tensor]:
    """Returns the flat tensors of a model's gradients."""
    engine = model.engine
    flats: list[Tensor] = engine.reducer.memory.grads if NEW else engine.grad_buffers.flats
    return flats


def owners_of(model: Any) -> Owners:
    """Returns the owners of the parameters that a model's optimizers step whole."""
    engine = model.engine
    if not NEW:
        owners: Owners = engine.owners
        return owners
    rank_of: dict[int, int] = {}
    for optimizer in engine.optimizers:
        rank_of |= optimizer().owners()
    return Owners(engine.layout, rank_of)


def main_params_of(optimizer: Any) -> dict[int, Tensor]:
    """Returns the fp32 main params that this rank steps, by parameter, of a wrapped optimizer: without padding."""
    impl = optimizer._impl
    if NEW:
        runs = [run for run in impl.runs if run.weights is not None]
        return {
            member.param: run.main if run.is_whole else run.read(run.main, member)
            for run in runs
            for member in run.members
        }
    shards = impl.shard_set.shards
    params = impl.engine.layout.params
    return {index: shard.main for index, shard in shards.items() if params[index].has_main_param}


def kept_numel(optimizer: Any) -> int:
    """Returns the number of element-wise numbers in the state on this rank, without the padding between parameters."""
    state = optimizer.state
    if not NEW:
        return sum(value.numel() for values in state.values() for value in values.values() if value.dim() > 0)
    total = 0
    for run in optimizer._impl.runs:
        num_kept = sum(value.dim() > 0 for value in state.get(run.main, {}).values())
        total += num_kept * sum(member.end - member.start for member in run.members)
    return total
