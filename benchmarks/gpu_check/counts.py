"""Counts of what an accelerator would pay for, on the host: operations, each a kernel there, and reads, each a wait.

A machine without an accelerator cannot time either, and need not: what must not grow can be counted anywhere.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

_ATEN = torch.ops.aten
_WITHOUT_KERNEL = {
    _ATEN.detach.default,
    _ATEN.view.default,
    _ATEN.view.dtype,
    _ATEN.view_as_real.default,
    _ATEN._unsafe_view.default,
    _ATEN.as_strided.default,
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default,
    _ATEN.unbind.int,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
    _ATEN.expand.default,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.alias.default,
    _ATEN.set_.source_Storage_storage_offset,
    _ATEN.empty.memory_format,
    _ATEN.new_empty.default,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
}
"""They make tensors and touch no element."""


class ThreadMode(TorchDispatchMode):
    """Sees the operations of the threads that enter it.

    torch's own also sets flags of the process while it is entered, and puts back what it found. Where threads enter and
    leave in turns, the last to leave finds them set, and they stay: torch.compile compiles nothing any more.
    """

    def __enter__(self) -> Self:
        _push_mode(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _pop_mode()


class Operations(ThreadMode):
    """Counts the operations of this thread that are a kernel at least on an accelerator.

    Attributes:
        counts: by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Collectives have a budget of their own, and are in another namespace.
        if func.namespace == "aten" and func not in _WITHOUT_KERNEL:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _callers() -> Iterator[str]:
    """The modules of the frames that called, the innermost first, with the functions' names."""
    frame = sys._getframe(2)
    while frame is not None:
        yield f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]


_READS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__", "cpu", "numpy"}
    | {"nonzero", "equal", "allclose", "is_nonzero", "masked_select", "unique"}
)


class HostReads(TorchFunctionMode):
    """Counts the reads of tensors by the host that core itself asks for in this thread; on an accelerator each waits
    for all that is queued.

    Attributes:
        counts: by the function of core that reads, and what it calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._reads(func, args, kwargs or {}):
            # The caller of the tensor's method. A read of the user's optimizer, which core calls, is not core's.
            caller = next((name for name in _callers() if not name.startswith(("torch._tensor.", __name__))), "")
            if caller.startswith("megastrategy.core."):
                self.counts[f"{caller}: {func.__name__}"] += 1
        # A mode is off while it deals with a call, and all of backward is in this one: hooks, and what ends it. So the
        # engine is asked directly, as torch.autograd.backward would be the next such call.
        if func is torch.Tensor.backward:
            (loss,) = args
            seed = torch.ones_like(loss)
            with self:
                torch.autograd.Variable._execution_engine.run_backward(
                    (loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            return None
        return func(*args, **(kwargs or {}))

    def _reads(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = getattr(func, "__name__", "")
        # Values of the host that become a tensor elsewhere are a copy from pageable memory, which waits as well.
        if name in ("tensor", "as_tensor", "frombuffer"):
            return kwargs.get("device") is not None
        return name in _READS
