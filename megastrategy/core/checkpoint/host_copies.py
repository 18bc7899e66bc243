"""Copies of state in host memory.

[Note: pinned memory]
A device copies to pinned memory by itself, as fast as the bus is. Into any other memory the driver copies by way of a
buffer of its own, tensor by tensor, while the host stands. Pinned memory is taken from every other program, and takes
long to pin. So there is a little of it, which is filled with as many tensors as it holds, waited for once, and emptied
by the host.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from .. import devices
from .flat_shard import FlatShard

PINNED_BYTES = 64 * 2**20
"""A few milliseconds of the bus, beside which a launch and a wait are nothing."""
_ALIGNMENT_BYTES = 16  # of what is copied at once into pinned memory: no dtype is larger


def to_host(state: Any) -> Any:
    """A copy of nested state in host memory that later steps do not change: what an asynchronous save writes."""
    pairs: list[tuple[Tensor, Tensor]] = []
    copied = _copy(state, pairs)
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for source, target in pairs:
        by_device.setdefault(source.device, []).append((source, target))
    for device, of_device in by_device.items():
        _fill(of_device, device)
    return copied


def _copy(state: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """A copy, but that targets in ``pairs`` of (source, target) are still to be filled."""
    if isinstance(state, FlatShard):
        return state.with_local(_copy(state.local, pairs))
    if isinstance(state, Tensor):
        source = state.detach()
        if devices.is_on_host(source.device) or type(source) is not Tensor or not source.is_contiguous():
            # copy=True: on the CPU to() would hand out the very tensor that the next step changes.
            return source.to("cpu", copy=True)
        pairs.append((source, torch.empty_like(source, device="cpu")))
        return pairs[-1][1]
    # Exactly these: a subclass may need more than its items, and deepcopy asks it.
    if type(state) in (dict, OrderedDict):
        return type(state)((key, _copy(value, pairs)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(_copy(value, pairs) for value in state)
    return copy.deepcopy(state)


def _fill(pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copies contiguous tensors of one device into their targets; see [Note: pinned memory]."""
    pinned = devices.pinned_memory(PINNED_BYTES, torch.uint8, device)
    taken = 0
    arriving: list[Tensor] = []
    targets: list[Tensor] = []

    def empty() -> None:
        torch.get_device_module(device).synchronize(device)
        torch._foreach_copy_(targets, arriving)
        arriving.clear()
        targets.clear()

    for source, target in pairs:
        numel = PINNED_BYTES // source.dtype.itemsize
        for part, of_target in zip(source.view(-1).split(numel), target.view(-1).split(numel), strict=True):
            if taken + part.nbytes > PINNED_BYTES:
                empty()
                taken = 0
            arriving.append(pinned[taken : taken + part.nbytes].view(part.dtype).copy_(part, non_blocking=True))
            targets.append(of_target)
            taken += -(-part.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if arriving:
        empty()
