"""The step where every data-parallel rank steps all parameters, but not the Parameters themselves.

It steps the main params of 16-bit parameters, and this rank's parts of tensor-parallel ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..shards import ParamShard
from .shard_set import ShardSet
from .step_arguments import StepArguments
from .step_memory import copy_kept_grads


def step_main_params(shard_set: ShardSet, arguments: StepArguments) -> None:
    """Calls the user's ``step`` on main params, and copies these into the weights."""
    engine = shard_set.engine
    with main_params_with_grads(shard_set) as own:
        arguments.call(shard_set.inner.step)
        stepped = [shard for shard in own if shard.main.grad is not None]
        parts = [_part(shard_set, shard).detach() for shard in stepped]
        apart = [pair for pair in zip(parts, stepped, strict=True) if pair[0].data_ptr() != pair[1].main.data_ptr()]
        if apart:
            torch._foreach_copy_([part for part, _ in apart], [shard.main.detach() for _, shard in apart])
    # Autograd did not see the parts of a DTensor change: a backward through an earlier graph must raise.
    params = [(shard, engine.params[shard.param]) for shard in stepped]
    torch.autograd.graph.increment_version([param for shard, param in params if _part(shard_set, shard) is not param])


@contextlib.contextmanager
def main_params_with_grads(shard_set: ShardSet) -> Iterator[list[ParamShard]]:
    """Puts main params and parts, with their gradients, into the optimizer's groups while this is open; yields them."""
    engine, shards = shard_set.engine, shard_set.shards
    every = [shards[index] for index in shard_set.param_indices()]
    own = [shard for shard in every if shard.main is not engine.params[shard.param]]
    for indices, buffer in shard_set.main_param_buffers:
        buffer.take_outside_changes([_part(shard_set, shards[index]).detach() for index in indices])
    try:
        for shard in own:
            part = _part(shard_set, shard)
            # User code gave the parameter other memory.
            if not shard_set.layout.params[shard.param].has_main_param and part.data_ptr() != shard.main.data_ptr():
                shard.main.data = part.detach()
        _set_grads(shard_set, own)
        grads = [shard.main.grad for shard in own]
        with shard_set.groups_of_shards():
            yield own
        copy_kept_grads(shard_set.inner.state, zip([shard.main for shard in own], grads, strict=True))
    finally:
        for shard in own:
            shard.main.grad = None
        for _, buffer in shard_set.main_param_buffers:
            buffer.bring_back()


def _set_grads(shard_set: ShardSet, shards: Sequence[ParamShard]) -> None:
    """Sets the gradients of main params and parts: views where the dtype is the same, otherwise copies."""
    narrow: list[Tensor] = []
    wide: list[Tensor] = []
    for shard in shards:
        grad = shard_set.engine.local_parts.local_grad(shard_set.engine.params[shard.param])
        if grad is not None and grad.dtype != shard.main.dtype:
            narrow.append(grad)
            wide.append(grad := torch.empty_like(shard.main))
        shard.main.grad = grad
    if narrow:
        torch._foreach_copy_(wide, narrow)


def _part(shard_set: ShardSet, shard: ParamShard) -> Tensor:
    """Returns this rank's part of the parameter, which the model reads."""
    return shard_set.engine.local_parts.local_view(shard_set.engine.params[shard.param])
