"""Norms of gradients by the names that Lightning's own utility gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import DistributedDataParallel


def named_grad_norms(model: object, norm_type: float) -> dict[str, Tensor]:
    """Returns the norms of ``lightning.pytorch.utilities.grad_norm(module, norm_type)`` under "ddp", in every mode.

    Collective with reduce-scatter.

    Raises:
        ValueError: if ``norm_type`` is no order of a norm.
        RuntimeError: if the model is not one that trains.
    """
    if norm_type <= 0:
        raise ValueError(f"norm_type={norm_type}: expected a positive number, or 'inf' for the largest element")
    if not isinstance(model, DistributedDataParallel):
        raise RuntimeError("grad_norm() works during a fit, between a backward and the next zero_grad")
    by_param = dict(zip(model.engine.params, model.grad_norms(norm_type), strict=True))
    norms = {
        f"grad_{norm_type}_norm/{name}": by_param[param]
        for name, param in model.engine.named_params().items()
        if param in by_param and param.grad is not None
    }
    # without a gradient Lightning's has no total either
    if norms:
        stacked = torch.stack(list(norms.values()))
        norms[f"grad_{norm_type}_norm_total"] = torch.linalg.vector_norm(stacked, norm_type)
    return {name: norm.to(torch.get_default_dtype()) for name, norm in norms.items()}
