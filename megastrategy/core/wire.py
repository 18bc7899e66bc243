"""Rounds gradients for the wire, in their own memory; see the configuration's ``grad_wire_dtype``."""

from __future__ import annotations

import torch
from torch import Tensor


def round_in_place(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds a 1-D contiguous tensor to a dtype of at most half of its size, in its own memory.

    Returns a view of ``dtype`` at the beginning of ``tensor``, which is invalid afterwards.
    """
    numel = tensor.numel()
    rounded = tensor.view(dtype)[:numel]
    # An eighth is rounded in other memory. The result takes half of the bytes or less, so from then on as many elements
    # as are done already can be rounded without overwriting their source: three times, whatever the size.
    start = -(-numel // 8)
    rounded[:start] = tensor[:start].to(dtype)
    while start < numel:
        end = min(2 * start, numel)
        rounded[start:end].copy_(tensor[start:end])
        start = end
    return rounded
