"""Runs a program with tensors of every size, without the memory and the time that the large ones would take.

[Note: tensors without values]
A tensor of :data:`LARGE_BYTES` or more is real to Python, to autograd and to the engine: it has a shape, an address and
views. But its pages are never written, so the system gives it no memory; and an operation that reads or makes one is
not carried out. ``FakeTensorMode`` computes the shapes of its results, operation by operation. Small results of such
operations are zeros: a loss, an index, a flag can be read. Small tensors are computed, tests of optimizers among
them. An operation whose shapes depend on values (``nonzero``) is carried out on whatever is there.
"""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

LARGE_BYTES = 2**20
"""More than the largest tensor of an optimizer's test in fp32, which has to be computed."""


# Python names it from 3.13 on. Without it Linux refuses a mapping that is larger than its memory; the number is that of
# x86 and Arm.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make and that are alive, from :meth:`start` on.

    Args:
        computes: whether large tensors have values; without, see [Note: tensors without values].

    Attributes:
        live_bytes: of storages made since the start, and not freed.
        num_computed: operations on large tensors that were carried out since their shapes depend on values.
    """

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self._fake = None if computes else FakeTensorMode()
        self.computes = computes
        self._counts = False
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._nbytes: dict[int, int] = {}
        self._kept: set[int] = set()
        self._trace: list[tuple[int, int]] = []  # (storage's number, bytes made or freed)
        self._number_of: dict[int, int] = {}
        self._num_storages = 0
        self.live_bytes = 0
        self.num_computed = 0

    # --- counting ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Counts what is made from now on."""
        self._counts = True

    def stop(self) -> None:
        """Counts no more; what is freed later is not seen either."""
        self._counts = False

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Excludes these tensors: they are state, which is counted elsewhere."""
        for tensor in tensors:
            number = self._number_of.get(local_tensor(tensor).untyped_storage()._cdata)
            if number is not None:
                self._kept.add(number)

    def position(self) -> int:
        """A place in the trace, for :meth:`peak_bytes`."""
        return len(self._trace)

    def number(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, for :meth:`peak_bytes`; None if it is not counted."""
        return self._number_of.get(tensor.untyped_storage()._cdata)

    def peak_bytes(self, start: int = 0, end: int | None = None, without: Collection[int | None] = ()) -> int:
        """The most bytes of temporaries that were alive at once between two places in the trace."""
        live = peak = 0
        for place, (number, nbytes) in enumerate(self._trace[:end]):
            if number not in self._kept and number not in without:
                live += nbytes
                if place >= start:
                    peak = max(peak, live)
        return peak

    def _note(self, results: Any, arguments: Sequence[Any]) -> None:
        """Counts the storages of ``results`` that no argument had."""
        argument_keys = {leaf.untyped_storage()._cdata for leaf in arguments if _has_storage(leaf)}
        for tensor in tree_leaves(results):
            if not _has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in argument_keys or key in self._number_of or storage.nbytes() == 0:
                continue
            number = self._num_storages
            nbytes = storage.nbytes()
            self._num_storages += 1
            self._number_of[key] = number
            self._trace.append((number, nbytes))
            self.live_bytes += nbytes
            self._refs[number] = weakref.ref(storage, self._freed(key, number, nbytes))

    def _freed(self, key: int, number: int, nbytes: int) -> Any:
        def free(_: Any) -> None:
            del self._refs[number], self._number_of[key]
            if self._counts:
                self._trace.append((number, -nbytes))
                self.live_bytes -= nbytes

        return free

    # --- operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = tree_leaves((args, kwargs))
        results = self._carry_out(func, args, kwargs, arguments)
        if self._counts:
            self._note(results, arguments)
        return results

    def _carry_out(self, func: Any, args: Any, kwargs: Any, arguments: Sequence[Any]) -> Any:
        if self._fake is None or func.is_view:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        reads_large = any(map(self._is_large, tensors))
        # What has no tensor to read makes one, of any size.
        if tensors and not reads_large and not _may_grow(func, args):
            return func(*args, **kwargs)
        devices = {tensor.device.type for tensor in tensors}
        if not devices <= {"cpu", "meta"}:
            return func(*args, **kwargs)
        if func is torch.ops.aten.equal.default:
            # To read all pages takes minutes and page tables, for zeros.
            return args[0].shape == args[1].shape
        try:
            shapes, is_alias = self._shapes(func, args, kwargs)
        except Exception:  # noqa: BLE001 - FakeTensorMode has an error for each way in which values are needed
            self.num_computed += reads_large
            return func(*args, **kwargs)
        results = tree_leaves(shapes)
        is_small = not reads_large and not any(map(self._is_large, results))
        # Meta tensors need no memory, but to_empty() makes tensors from them that do.
        stays_on_meta = "meta" in devices and not any(_is_on_cpu(result) for result in results)
        if is_small or is_alias or stays_on_meta:
            return func(*args, **kwargs)
        return self._stand_ins(func, args, kwargs, shapes)

    def _is_large(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() >= LARGE_BYTES

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """The results as fake tensors, and whether one is another view of what was passed: that costs nothing."""
        assert self._fake is not None
        with self._fake:
            args, kwargs = tree_map_only(Tensor, _shape_of, (args, kwargs))
            passed = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
            shapes = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(shapes) if _has_storage(leaf)]
        is_alias = not func._schema.is_mutable and any(leaf.untyped_storage()._cdata in passed for leaf in results)
        return shapes, is_alias

    def _stand_ins(self, func: Any, args: Any, kwargs: Any, shapes: Any) -> Any:
        """Results of these shapes: what is written in place is what was passed, and the rest is new."""
        returns = func._schema.returns
        if not returns:
            return None
        written = {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                written[tuple(argument.alias_info.before_set)] = value
        made = []
        for declared, result in zip(returns, shapes if len(returns) > 1 else (shapes,), strict=True):
            alias = declared.alias_info
            if alias is not None and alias.is_write:
                made.append(written[tuple(alias.before_set)])
            else:
                made.append(tree_map_only(Tensor, self._stand_in, result))
        return made[0] if len(returns) == 1 else tuple(made)

    def _stand_in(self, shape: Tensor) -> Tensor:
        nbytes = shape.untyped_storage().nbytes()
        if shape.device.type != "cpu" or nbytes < LARGE_BYTES:
            # Written: memory that was used before may hold what is no number.
            made = torch.zeros(nbytes, dtype=torch.uint8, device=shape.device)
        else:
            made = torch.frombuffer(_untouched(nbytes), dtype=torch.uint8)
        flat = made.untyped_storage()
        return torch.empty(0, dtype=shape.dtype, device=shape.device).set_(
            flat, shape.storage_offset(), shape.shape, shape.stride()
        )


def _may_grow(func: Any, args: Sequence[Any]) -> bool:
    """Whether small tensors can make a large one: the gradient of a weight by a batch of one row is an outer product,
    and that of an embedding has as many rows as an argument says."""
    if func._schema.is_mutable or torch.Tag.pointwise in func.tags:
        return False
    most_bytes = 8
    for argument in args:
        if isinstance(argument, Tensor):
            most_bytes *= max(1, argument.numel())
        elif isinstance(argument, int):
            most_bytes *= max(1, argument)
        elif isinstance(argument, list) and all(isinstance(size, int) for size in argument):
            most_bytes *= max(1, *argument, math.prod(argument))
    return most_bytes >= LARGE_BYTES


def local_tensor(tensor: Any) -> Any:
    """Returns this rank's part of a DTensor, which has no memory of its own; any other object as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _shape_of(tensor: Tensor) -> Tensor:
    """Inside of a fake mode: a fake tensor of the same shape, with memory of its own."""
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"{tensor.layout} has other parts than a shape")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _untouched(nbytes: int) -> mmap.mmap:
    """Pages that the system reserves no memory for. They get memory when they are written."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def _is_on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided
