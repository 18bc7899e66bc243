"""Arithmetic on lists of tensors that collectives send or receive."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import devices
from ..wire import read_wire, wire_part

_PIECE_NUMEL = 2**16  # 256 kB in fp32: a piece of sums, total and addend stay in a core's second-level cache
_DEVICE_PIECE_NUMEL = 2**24


def add_parts_(sums: Tensor, parts: Sequence[Tensor], scale: float, scale_sum: bool) -> None:
    """Adds ``scale`` times the sum of ``parts`` (as many numbers as ``sums``, as they were sent; the caller gives them
    up) to ``sums`` (1-D), in its dtype: first part first, and the total to what was there. The same bits on every kind
    of device."""
    if devices.is_on_host(sums.device):
        _add_in_pieces_(sums, parts, scale, scale_sum, _PIECE_NUMEL)
    elif parts[0].dtype == torch.int8:  # read in wider memory, of which pieces take less
        _add_in_pieces_(sums, parts, scale, scale_sum, _DEVICE_PIECE_NUMEL)
    else:
        _add_in_whole_(sums, parts, scale, scale_sum)


def _add_in_pieces_(sums: Tensor, parts: Sequence[Tensor], scale: float, scale_sum: bool, numel: int) -> None:
    """In pieces of so many elements, which stay in the cache of a host."""
    for start in range(0, sums.numel(), numel):
        end = min(start + numel, sums.numel())
        piece = slice(start, end)
        # Summed apart, then added: the sum over ranks has the same bits whatever earlier backwards left in sums.
        total = torch.zeros_like(sums[piece])
        for part in parts:
            came = read_wire(wire_part(part, start, end), end - start)
            # A power of two times 16 bits is exact, and so is added in one pass.
            if part.dtype != sums.dtype and (scale_sum or _is_power_of_two(scale)):
                total.add_(came, alpha=1.0 if scale_sum else scale)
                continue
            # Widened before it is scaled: a product in 16 bits would lose what the fp32 sum is for. Where dtypes agree
            # this scales the part itself.
            addend = came.to(sums.dtype)
            total.add_(addend if scale_sum or scale == 1.0 else addend.mul_(scale))
        sums[piece].add_(total.mul_(scale) if scale_sum and scale != 1.0 else total)


def _add_in_whole_(sums: Tensor, parts: Sequence[Tensor], scale: float, scale_sum: bool) -> None:
    """In as few operations as give the bits of the pieces: one a part, and three more."""
    total = torch.zeros_like(sums)
    if scale_sum or scale == 1.0:
        for part in parts:  # an addition widens its addend as it goes
            total.add_(part)
        sums.add_(total.mul_(scale) if scale != 1.0 else total)
        return
    if parts[0].dtype == sums.dtype:
        torch._foreach_mul_(list(parts), scale)
        for part in parts:
            total.add_(part)
    elif _is_power_of_two(scale):
        # A power of two times 16 bits is exact in fp32, so it does not matter that a multiply-add rounds only once.
        for part in parts:
            total.add_(part, alpha=scale)
    else:
        # A tensor of one element and not a number: the product then has the wider dtype, and is rounded before it is
        # added.
        factor = torch.full((1,), scale, dtype=sums.dtype, device=sums.device)
        for part in parts:
            total.add_(part * factor)
    sums.add_(total)


def _is_power_of_two(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


def coalesce_by_dtype(tensors: Sequence[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """The tensors in groups of one dtype and device, each of at most ``max_bytes`` (or one tensor)."""
    chunks: list[list[Tensor]] = []
    kinds = list(dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors))
    for kind in kinds:
        current: list[Tensor] = []
        current_bytes = 0
        # A tensor of no elements has nothing to send, and cat would have nothing of it to cut again.
        for tensor in (tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind and tensor.numel() > 0):
            if current and current_bytes + tensor.nbytes > max_bytes:
                chunks.append(current)
                current, current_bytes = [], 0
            current.append(tensor)
            current_bytes += tensor.nbytes
        if current:
            chunks.append(current)
    return chunks


def digest_of(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's elements, row by row."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def bytes_of(tensor: Tensor) -> bytearray:
    """A copy of a tensor's elements, row by row, in host memory. Without numpy, which torch is installed without."""
    data = bytearray(tensor.nbytes)
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return data
