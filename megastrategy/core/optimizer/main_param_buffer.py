"""Contiguous main params of 16-bit parameters that every rank has in full: on one rank, and with all-reduce.

The optimizer steps one main param per parameter, as torch DDP's user expects. User code may change weights between
steps, and each step compares all elements to find that (sharded_optimizer's [Note: main params]). With contiguous
memory per bucket the comparison is four kernels per bucket. Parameter by parameter it was five kernels each: 1,460
launches in the step of a model of 292 parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import devices
from ..buffers import slice_view
from ..shards import take_outside_changes
from .step_memory import bring_back

_ALIGNMENT_NUMEL = 4
"""fp32 elements in 16 bytes: multi-tensor kernels read tensors that begin elsewhere element by element."""


class MainParamBuffer:
    """The fp32 main params of one bucket's 16-bit parameters, in contiguous memory.

    ``weights``: the parameters, dense, of one dtype. The main params start with their values.

    Attributes:
        mains: one for each parameter, with its shape and strides, and a storage of its own in the buffer's memory.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        numel = sum(weight.numel() for weight in weights)
        self._flat = torch.empty(numel, dtype=torch.float32, device=weights[0].device)
        # Parameters of odd sizes come last, so that the others stay aligned.
        order = sorted(range(len(weights)), key=lambda index: weights[index].numel() % _ALIGNMENT_NUMEL != 0)
        starts, start = [0] * len(weights), 0
        for index in order:
            starts[index], start = start, start + weights[index].numel()
        self._starts = starts
        self.mains = [
            slice_view(self._flat, start, weight.shape, weight.stride(), weight.numel())
            for weight, start in zip(weights, starts, strict=True)
        ]
        torch._foreach_copy_(self.mains, list(weights))
        self._places = [main.detach() for main in self.mains]

    def take_outside_changes(self, weights: Sequence[Tensor]) -> None:
        """Copies weights into main params that do not round to them. ``weights``: in the order of ``mains``."""
        if devices.is_on_host(self._flat.device):  # one parameter fits into a core's cache where a bucket does not
            for main, weight in zip(self.mains, weights, strict=True):
                take_outside_changes(main, weight, weight.dtype)
            return
        # In fp32, which compares with 16 bits exactly, so that one copy serves the comparison and the main params.
        wide = torch.empty_like(self._flat)
        views = [
            wide.as_strided(main.shape, main.stride(), start)
            for main, start in zip(self.mains, self._starts, strict=True)
        ]
        torch._foreach_copy_(views, list(weights))
        take_outside_changes(self._flat, wide, weights[0].dtype)

    def bring_back(self) -> None:
        """Moves main params back into the buffer that got other memory in an optimizer's step (``p.data = ...``)."""
        bring_back(self.mains, self._places)
