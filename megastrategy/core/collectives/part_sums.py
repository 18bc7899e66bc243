"""Arithmetic on lists of tensors that collectives send or receive."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import devices

_SLICE_NUMEL = 2**16  # 256 kB in fp32: a slice of sums, total and addend stay in a core's second-level cache


def add_parts_(sums: Tensor, parts: Sequence[Tensor], scale: float) -> None:
    """Adds ``scale`` times the sum of ``parts`` to ``sums`` (1-D), in its dtype: the parts in order, and then the total
    to the previous value. The same bits on every kind of device. ``parts`` have the numbers of ``sums`` as they were
    sent, and are invalid afterwards."""
    # On a host in slices that stay in its cache.
    step = _SLICE_NUMEL if devices.is_on_host(sums.device) else max(1, sums.numel())
    for start in range(0, sums.numel(), step):
        place = slice(start, start + step)
        _add_(sums[place], [part[place] for part in parts], scale)


def _add_(sums: Tensor, parts: Sequence[Tensor], scale: float) -> None:
    """Adds in one or two operations per part, and three more."""
    # Summed separately, then added: the sum over ranks has the same bits whatever sums contains already.
    total = torch.zeros_like(sums)
    if scale == 1.0 or parts[0].dtype == sums.dtype:
        if scale != 1.0:
            torch._foreach_mul_(list(parts), scale)
        for part in parts:
            total.add_(part)
    elif _is_power_of_two(scale):
        # A power of two times 16 bits is exact in fp32, so a fused multiply-add, which rounds only once, is right.
        for part in parts:
            total.add_(part, alpha=scale)
    else:
        # A tensor of one element, not a number: the product then has the wider dtype, and is rounded
        # before it is added.
        factor = torch.full((1,), scale, dtype=sums.dtype, device=sums.device)
        for part in parts:
            total.add_(part * factor)
    sums.add_(total)


def _is_power_of_two(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


def coalesce_by_dtype(tensors: Sequence[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Returns the tensors in groups of one dtype and device, each of at most ``max_bytes`` (or one tensor)."""
    groups: list[list[Tensor]] = []
    kinds = list(dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors))
    for kind in kinds:
        current: list[Tensor] = []
        current_bytes = 0
        # A tensor without elements has nothing to send.
        for tensor in (tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind and tensor.numel() > 0):
            if current and current_bytes + tensor.nbytes > max_bytes:
                groups.append(current)
                current = []
                current_bytes = 0
            current.append(tensor)
            current_bytes += tensor.nbytes
        if current:
            groups.append(current)
    return groups


def digest_of(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's elements, row by row."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def bytes_of(tensor: Tensor) -> bytearray:
    """Returns a copy of a tensor's elements, row by row, in host memory. Without numpy, which torch
    may be installed without."""
    data = bytearray(tensor.nbytes)
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return data
