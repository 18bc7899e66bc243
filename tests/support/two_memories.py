"""Distinguishes the host's memory from a simulated device's, and refuses operations as an accelerator would."""

from __future__ import annotations

import bisect
import threading
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megastrategy.core import devices

from .thread_mode import ThreadMode

_present = threading.local()
_make_pinned = devices.pinned_memory


class TwoMemories(ThreadMode):
    """Counts this thread's tensors from ``devices.pinned_memory`` as the host's, and all others as the device's.

    While entered, it raises an AssertionError if an operation other than a copy has tensors of both, and if one of the
    host's is sent.

    One of a single element counts for neither: an accelerator takes it from the host. Within :func:`told_apart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._starts: list[int] = []
        # By address of their memory, which is not given out again: a tensor, and whether it is pinned.
        self._on_host: dict[int, tuple[Tensor, bool]] = {}

    def __enter__(self) -> Self:
        _present.mode = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _present.mode = None

    def is_on_host(self, tensor: Tensor) -> bool:
        return self._found(tensor) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._found(tensor) is True

    def _found(self, tensor: Tensor) -> bool | None:
        """Whether it is in pinned memory; None on the device."""
        # By place and not by storage: a part of a tensor may have one of its own.
        number = bisect.bisect_right(self._starts, tensor.data_ptr())
        if number == 0:
            return None
        start = self._starts[number - 1]
        whole, is_pinned = self._on_host[start]
        return is_pinned if tensor.data_ptr() - start < whole.untyped_storage().nbytes() else None

    def put_on_host(self, tensor: Tensor, *, is_pinned: bool) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and not self.is_on_host(tensor):
            bisect.insort(self._starts, storage.data_ptr())
            self._on_host[storage.data_ptr()] = tensor, is_pinned
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.numel() > 1]
        where = {self.is_on_host(tensor) for tensor in given}
        copies = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_)
        assert copies or len(where) < 2, f"{func} of tensors of the host and of the device"
        assert func.namespace != "c10d" or True not in where, f"{func} of tensors of the host"
        made = func(*args, **kwargs or {})
        for leaf in tree_leaves(made) if where == {True} else ():
            if isinstance(leaf, Tensor):
                self.put_on_host(leaf, is_pinned=False)
        return made


def told_apart() -> Any:
    """While this is open threads may enter a :class:`TwoMemories`."""
    return mock.patch.multiple(devices, pinned_memory=_pinned_memory, is_pinned=_is_pinned, on_host=_on_host)


def _pinned_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    made, mode = _make_pinned(numel, dtype, device), getattr(_present, "mode", None)
    return made if mode is None else mode.put_on_host(made, is_pinned=True)


def _on_host(tensor: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    mode: TwoMemories | None = getattr(_present, "mode", None)
    if mode is None or mode.is_on_host(tensor):
        return tensor.to(dtype, copy=copy)
    return mode.put_on_host(tensor.to(dtype, copy=True), is_pinned=False)


def _is_pinned(tensor: Tensor, device: torch.device) -> bool:
    mode: TwoMemories | None = getattr(_present, "mode", None)
    return mode is None or mode.is_pinned(tensor)
