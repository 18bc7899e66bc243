"""What tests read of the data path."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megastrategy.core.layout.owners import Owners


def buffers_of(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the flat tensors of a sharded model's weights and gradients."""
    memory = model.engine.reducer.memory
    return memory.weights.flats, memory.grads


def memory_of(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the flat tensors of weights, none without shards, and those of gradients and their sums."""
    memory = model.engine.reducer.memory
    weights = [] if memory.weights is None else memory.weights.flats
    return weights, [*memory.grads, *(sums for sums in memory.sums if sums is not None)]


def grads_of(model: Any) -> list[Tensor]:
    """Returns the flat tensors of a model's gradients."""
    flats: list[Tensor] = model.engine.reducer.memory.grads
    return flats


def owners_of(model: Any) -> Owners:
    """Returns the owners of the parameters that a model's optimizers step whole."""
    rank_of: dict[int, int] = {}
    for optimizer in model.engine.optimizers:
        rank_of |= optimizer().owners()
    return Owners(model.engine.layout, rank_of)


def state_bytes_of(optimizer: Any) -> int:
    """Returns the bytes of main params and element-wise state on this rank, with the padding between parameters."""
    impl = optimizer._impl
    states = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    mains = sum(run.main.nbytes for run in impl.runs if run.has_main_param)
    return mains + sum(value.nbytes for value in states if value.dim() > 0)


def copied_grads(optimizer: Any) -> list[Tensor]:
    """Returns the copies of reduced gradients that a step has made, in another dtype or in the shape of a parameter."""
    grads = [run.main.grad for run in optimizer._impl.runs if run.copies_grad or run.grad is None]
    return [grad for grad in grads if grad is not None]


def stepped(optimizer: Any) -> list[Tensor]:
    """Returns the tensors that a wrapped optimizer steps on this rank."""
    return [run.main for run in optimizer._impl.runs]


def main_params_of(optimizer: Any) -> dict[int, Tensor]:
    """Returns the fp32 main params that this rank steps, by parameter, of a wrapped optimizer: without padding."""
    runs = [run for run in optimizer._impl.runs if run.weights is not None]
    return {
        member.param: run.main if run.is_whole else run.read(run.main, member) for run in runs for member in run.members
    }


def kept_numel(optimizer: Any) -> int:
    """Returns the number of numbers in the state on this rank, without counters and the padding between parameters."""
    if not optimizer._impl.has_runs:
        return sum(v.numel() for values in optimizer.state.values() for v in values.values() if v.dim() > 0)
    total = 0
    for run in optimizer._impl.runs:
        numel = sum(member.end - member.start for member in run.members)
        tensors = [value for value in optimizer.state.get(run.main, {}).values() if isinstance(value, Tensor)]
        total += sum(numel if run.is_elementwise(value) else value.numel() for value in tensors if value.dim() > 0)
    return total
