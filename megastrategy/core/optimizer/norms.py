"""Reads the gradients that this rank owns, and their norm over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..sync import norms_over_owners, total_grad_norm
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
