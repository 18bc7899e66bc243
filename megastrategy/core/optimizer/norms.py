"""Reads the gradients and weights that this rank owns: their norms and zeros, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..collectives import Collectives
from ..sync import count_zeros, norms_over_owners, total_grad_norm
from .extra_params import join_norm
from .shard_set import ShardSet


def owned_grads(shard_set: ShardSet) -> dict[int, Tensor]:
    """Returns the reduced gradients of the optimizer's parameters that this rank owns, by parameter: views, in the
    gradient dtype."""
    engine, indices = shard_set.engine, shard_set.param_indices()
    if not shard_set.sharded:
        params, grad_of = engine.params, engine.local_parts.local_grad
        return {i: grad for i in indices if (grad := grad_of(params[i])) is not None}
    has_grad, views = engine.grad_buffers.has_grad, shard_set.grad_views
    return {i: views[i] for i in indices if has_grad[i] and i in views}


def norm_of_grads(shard_set: ShardSet, grads: Mapping[int, Tensor], norm_type: float) -> Tensor:
    """Returns the norm over all owners of ``grads``, and of extra parameters. Collective.

    It is a scalar in fp32, or in fp64 if the model has fp64 gradients.
    """
    counted = list(_counted(shard_set, grads).values())
    norm = total_grad_norm(counted, norm_type, shard_set.owner_collectives, shard_set.engine.device)
    norm = _over_model(shard_set, norm, norm_type)
    if shard_set.extra_params.params:
        engine, grads_of_extra = shard_set.engine, shard_set.extra_params.grads()
        # One number on all ranks among which parameters are divided.
        groups = [*([engine.collectives] if shard_set.sharded else []), *engine.model_parallel.collectives]
        norm = join_norm(norm, grads_of_extra, norm_type, groups, engine.device)
    return _in_norm_dtype(shard_set, norm)


def num_zeros(shard_set: ShardSet) -> Tensor:
    """Returns the number of zeros in the reduced gradients, without extra parameters'. Collective."""
    owners: list[Collectives] = [] if (ranks := shard_set.owner_collectives) is None else [ranks]
    counted, engine = _counted(shard_set, owned_grads(shard_set)), shard_set.engine
    return count_zeros([*counted.values()], [*owners, *engine.model_parallel.collectives], engine.device)


def param_norm(shard_set: ShardSet, norm_type: float) -> Tensor:
    """Returns the norm of the optimizer's parameters over all owners. Collective."""
    engine = shard_set.engine
    engine.check_open()
    shard_set.add_new_params()
    if engine.param_buffers is not None:  # new weights may be on their way, or have been given other memory
        engine.param_gather.finish()
        engine.param_buffers.recapture()
    norm = total_grad_norm(_owned_weights(shard_set), norm_type, shard_set.owner_collectives, engine.device)
    return _in_norm_dtype(shard_set, _over_model(shard_set, norm, norm_type))


def _owned_weights(shard_set: ShardSet) -> list[Tensor]:
    """The weights of the optimizer's parameters, frozen ones too, without extra parameters. Views.

    Each element is on one of the ranks over which norms are joined.
    """
    engine, owned = shard_set.engine, list[Tensor]()
    extra_params = {id(param) for param in shard_set.extra_params.params}
    for param in shard_set.params():
        if id(param) in extra_params or not engine.model_parallel.is_counted_here(param):
            continue
        if shard_set.sharded and (index := shard_set.sharded_index(param)) is not None:
            shard = shard_set.shards.get(index)
            owned += [] if shard is None else [shard.main if shard.weights is None else shard.weights]
            continue
        # A frozen parameter is complete on each rank that would share out its elements: the first of them counts it.
        domain = engine.model_parallel.domain_of(param) or engine.layout.domain
        if not shard_set.sharded or engine.ranks_of(domain).rank == 0:
            owned.append(engine.local_parts.local_view(param).detach())
    return owned


def _counted(shard_set: ShardSet, grads: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The gradients that this tensor rank counts."""
    is_counted_here, params = shard_set.engine.model_parallel.is_counted_here, shard_set.engine.params
    return {index: grad for index, grad in grads.items() if is_counted_here(params[index])}


def _over_model(shard_set: ShardSet, norm: Tensor, norm_type: float) -> Tensor:
    for ranks in shard_set.engine.model_parallel.collectives:
        norm = norms_over_owners(norm.reshape(1), norm_type, ranks)[0]
    return norm


def _in_norm_dtype(shard_set: ShardSet, norm: Tensor) -> Tensor:
    in_fp64 = any(spec.grad_dtype == torch.float64 for spec in shard_set.layout.params)
    return norm if in_fp64 else norm.to(torch.float32)
