"""Distinguishes the devices on which the same arithmetic is arranged differently.

[Note: work on the host and on an accelerator]
On the host an operation costs its elements: data that fits into a core's cache is processed in one go, and reading a
number is free. On an accelerator an operation costs a launch, whatever its size, and a read makes the host wait for all
queued work. So each has its own arrangement, with the same bits. Code with two arrangements asks here, and only here:
tests run the accelerator's on the host by replacing the answer.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def pinned_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns host memory, 1-D and not initialised, that ``device`` copies to by itself; ordinary
    memory for the host."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")


def pinned_bytes(nbytes: int, device: torch.device) -> int:
    """Returns the bytes that :func:`pinned_memory` takes for ``nbytes``: torch rounds each allocation up to
    a power of two."""
    return nbytes if device.type == "cpu" or nbytes == 0 else 1 << (nbytes - 1).bit_length()


def on_host(tensor: torch.Tensor, dtype: torch.dtype, *, copy: bool = False) -> torch.Tensor:
    """Returns the values of a tensor in host memory: itself, if they are there in this dtype and need no copy."""
    return tensor.to("cpu", dtype, copy=copy)


def is_pinned(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is in memory as :func:`pinned_memory` makes it."""
    return tensor.device.type == "cpu" and (device.type == "cpu" or tensor.is_pinned())


def is_on_host(device: torch.device) -> bool:
    """Whether the processor itself computes there; see [Note: work on the host and on an accelerator]."""
    return device.type == "cpu"


def streams_of(device: torch.device) -> Any:
    """Returns ``Stream``, ``Event``, ``stream`` and ``current_stream`` of a device; None if work is done
    when it is started."""
    streams: Any = torch.get_device_module(device)
    return streams if device.type != "cpu" and hasattr(streams, "Stream") else None


def current_stream(device: torch.device) -> Any:
    """Returns the stream on which work on ``device`` is queued; None if a device has none."""
    streams: Any = torch.get_device_module(device)
    return streams.current_stream(device) if hasattr(streams, "current_stream") else None


def on_stream(stream: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Queues the work inside on ``stream`` of ``device``; no change if it is the current one."""
    if stream == current_stream(device):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).stream(stream)
    return context
