"""Copies of state in host memory.

[Note: pinned memory]
A device copies to pinned memory by itself, at the speed of the bus. Into any other memory the driver copies through a
buffer of its own, tensor by tensor, while the host waits. Pinned memory is not available to other programs, and takes
long to pin. So there is a little of it, in two halves: the device fills one with several tensors while the host empties
the other. The host writes pages that no process has used before, which is slower than the bus, so only the time of its
writes remains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import devices
from .flat_shard import FlatShard

PINNED_BYTES = 64 * 2**20
"""A few milliseconds of the bus, beside which a launch and a wait are nothing."""
_ALIGNMENT_BYTES = 16  # between tensors in pinned memory: no dtype is larger


def to_host(state: Any) -> Any:
    """Copies nested state to host memory, where later steps do not change it: for asynchronous saves, for example."""
    pairs: list[tuple[Tensor, Tensor]] = []
    copied = tree_map(lambda value: _copy(value, pairs), state)
    copy_to_host([source for source, _ in pairs], [target for _, target in pairs])
    return copied


def copy_to_host(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copies contiguous tensors of any devices into contiguous host memory."""
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        by_device.setdefault(source.device, []).append((source, target))
    for device, of_device in by_device.items():
        if devices.is_on_host(device):
            torch._foreach_copy_([target for _, target in of_device], [source for source, _ in of_device])
        else:
            _fill(of_device, device)


def _copy(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """Copies one value, except that the targets in ``pairs`` (source, target) are still to be filled."""
    if isinstance(value, FlatShard):
        return value.map(lambda piece: _copy(piece, pairs))
    if isinstance(value, Tensor):
        source = value.detach()
        if devices.is_on_host(source.device) or type(source) is not Tensor or not source.is_contiguous():
            # copy=True: on the CPU to() would return the tensor itself, which the next step changes.
            return source.to("cpu", copy=True)
        pairs.append((source, torch.empty_like(source, device="cpu")))
        return pairs[-1][1]
    return copy.deepcopy(value)  # a subclass of a container, too, since it may need more than its items


class _Half:
    """Half of the pinned memory, and the copies into it that are under way."""

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self._num_used_bytes = 0
        self._arriving: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._wait: Callable[[], object] = lambda: None

    def has_space_for(self, part: Tensor) -> bool:
        return self._num_used_bytes + part.nbytes <= self._memory.numel()

    def start(self, part: Tensor, target: Tensor) -> None:
        """Starts to copy contiguous elements from the device; :meth:`empty` puts them into ``target``."""
        start = self._num_used_bytes
        self._arriving.append(self._memory[start : start + part.nbytes].view(part.dtype))
        self._arriving[-1].copy_(part, non_blocking=True)
        self._targets.append(target)
        self._num_used_bytes += -(-part.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def mark(self) -> None:
        """Records the end of the copies that :meth:`empty` waits for."""
        if (streams := devices.streams_of(self._device)) is None:
            self._wait = lambda: torch.get_device_module(self._device).synchronize(self._device)
        else:
            event = streams.Event()
            event.record(streams.current_stream(self._device))
            self._wait = event.synchronize

    def empty(self) -> None:
        """Waits for the copies up to :meth:`mark`, and moves them to their targets."""
        if self._arriving:
            self._wait()
            torch._foreach_copy_(self._targets, self._arriving)
        self._num_used_bytes, self._arriving, self._targets = 0, [], []


def _fill(pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copies contiguous tensors of one device into their targets; see [Note: pinned memory]."""
    pinned = devices.pinned_memory(PINNED_BYTES, torch.uint8, device)
    half_nbytes = PINNED_BYTES // 2
    filling, emptying = (_Half(memory, device) for memory in pinned.split(half_nbytes))
    for source, target in pairs:
        numel = half_nbytes // source.dtype.itemsize
        for part, of_target in zip(source.view(-1).split(numel), target.view(-1).split(numel), strict=True):
            if not filling.has_space_for(part):
                filling.mark()
                emptying.empty()  # while the copies into the other half go on
                filling, emptying = emptying, filling
            filling.start(part, of_target)
    filling.mark()
    emptying.empty()
    filling.empty()
