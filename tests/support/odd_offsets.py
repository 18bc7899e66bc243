"""Places weights and gradients at odd addresses: pytest's option ``--odd-offsets``.

Torch's allocator and the engine's layout begin each tensor at a multiple of 64 bytes. A library of matrix products may
choose its kernel by the address of an operand, and another kernel rounds differently. With the option the flat memory
of weights begins 4 bytes after such a multiple, in torch DDP's module too, and that of gradients 8 bytes. A result then
differs if an operation reads weights from another place than the reference does.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megastrategy.core.data_path import memory, param_buffers

VARIABLE = "ODD_OFFSETS"
"""The environment variable that tests/support/__init__.py reads, in ranks that are other processes too."""
ALIGNMENT_BYTES, WEIGHT_BYTES, GRAD_BYTES = 64, 4, 8


def place(shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int) -> Tensor:
    """Returns zeros whose storage begins ``offset_bytes`` after a multiple of 64, or one element if that is longer."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = torch.zeros(nbytes + 2 * ALIGNMENT_BYTES, dtype=torch.uint8).numpy()
    start = -memory.ctypes.data % ALIGNMENT_BYTES + max(offset_bytes, dtype.itemsize)
    if not nbytes:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, offset=start, count=math.prod(shape)).view(shape)


class _Torch(ModuleType):
    """The module ``torch`` whose ``zeros`` on the CPU are placed by :func:`place`."""

    def __init__(self, offset_bytes: int) -> None:
        super().__init__("torch")
        self._offset_bytes = offset_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return place((numel,), dtype, self._offset_bytes)


def install() -> None:
    """From now on, in this process."""
    vars(param_buffers)["torch"], vars(memory)["torch"] = _Torch(WEIGHT_BYTES), _Torch(GRAD_BYTES)
    kind = nn.parallel.DistributedDataParallel
    init = kind.__init__

    @functools.wraps(init)
    def init_placed(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        for param in module.parameters():
            if type(param) is nn.Parameter and param.device.type == "cpu" and param.is_contiguous():
                param.data = place(tuple(param.shape), param.dtype, WEIGHT_BYTES).copy_(param.data)
        init(self, module, *args, **kwargs)

    kind.__init__ = init_placed  # type: ignore[method-assign]
