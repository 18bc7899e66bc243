"""Gathers full gradients, and the norm of each; collective where gradients are sharded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from ..buffers import ReducedGrad
from ..sync import norms_of, norms_over_owners, zero_norms
from .engine import Engine


def full_grad(engine: Engine, param: Parameter) -> Tensor | None:
    """See :meth:`DistributedDataParallel.full_grad <megastrategy.DistributedDataParallel.full_grad>`."""
    engine.check_open()
    index = engine.index_by_id.get(id(param))
    if index is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is not a trainable parameter of the wrapped module"
        )
    grads, is_local = engine.grad_buffers, engine.reducer.is_local(index)
    if is_local and isinstance(stand_in := param.grad, ReducedGrad):
        return _with_pending(engine, param, stand_in)
    if is_local or not grads.is_sharded(index):
        return None if param.grad is None else param.grad.detach().clone()
    grads.adopt_written_grads([index])
    if not grads.has_grad[index]:
        return None
    spec, slot = engine.layout.params[index], engine.layout.slots[index]
    full = torch.zeros(spec.numel, dtype=engine.layout.buffers[slot.buffer].sum_dtype, device=engine.device)
    owned, own_grad = engine.layout.owned_range(index, engine.collectives.rank), grads.owned(index)
    domain = engine.layout.buckets[slot.bucket].domain
    in_first_instance = engine.collectives.rank < engine.layout.num_shards  # others own the same
    if owned is not None and own_grad is not None and in_first_instance:
        full[owned[0] - slot.start : owned[1] - slot.start] = own_grad
    engine.ranks_of(domain).all_reduce(full, 1.0).wait()  # every element is zero on all ranks but its owner
    return engine.local_parts.as_grad(param, full.as_strided(spec.shape, spec.stride))


def _with_pending(engine: Engine, param: Parameter, stand_in: ReducedGrad) -> Tensor | None:
    """Returns the reduced gradient plus the gradient of a backward on this rank that was not prepared."""
    pending = stand_in.take_pending()
    try:
        full = full_grad(engine, param)
    finally:
        stand_in.pending = pending
    return pending if full is None or pending is None else full.add_(pending)


def grad_norms(engine: Engine, norm_type: float) -> Tensor:
    """See :meth:`DistributedDataParallel.grad_norms <megastrategy.DistributedDataParallel.grad_norms>`."""
    grads, every = engine.grad_buffers, range(len(engine.params))
    is_scattered = any(map(grads.is_sharded, every))  # the same on all ranks
    sharded = [i for i in every if grads.is_sharded(i) and not engine.reducer.is_local(i)]
    grads.adopt_written_grads(sharded)
    norms = zero_norms(len(engine.params), engine.device)
    own = norms.clone()
    for index in sharded:
        if grads.has_grad[index] and (grad := grads.owned(index)) is not None:
            own[index : index + 1] = norms_of([grad], norm_type, own.dtype)
    if is_scattered:
        norms = norms_over_owners(own, norm_type, engine.shard_collectives)
    for index in set(every).difference(sharded):
        if (local := engine.local_parts.local_grad(engine.params[index])) is not None:
            norms[index : index + 1] = norms_of([local], norm_type, norms.dtype)
    part_ranks = next((group.ranks for group in engine.model_parallel.groups if group.state is None), None)
    if part_ranks is not None:
        for index, param in enumerate(engine.params):
            if not engine.model_parallel.is_counted_here(param):
                norms[index] = 0.0
        norms = norms_over_owners(norms, norm_type, part_ranks)
    return norms
