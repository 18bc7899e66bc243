"""A rank's part of a full tensor, as torch.distributed.checkpoint writes and reads it.

A shard is a range of the tensor's elements in memory order. In general that is no box of rows and columns, and the
format knows only boxes. Cut at the ends of rows, the range falls into at most ``2 * ndim - 1`` boxes, each of them
contiguous memory of the shard, unless the optimizer steps it in several runs. So shards are written without a copy, or
with one of a box at a time, and any reader of the format (with a different
number of ranks, with FSDP, in one process) finds an ordinary tensor by its parameter's name.

A shard of a tensor-parallel parameter is a range of this rank's part, which is itself a box of the full tensor: the
shard's boxes begin that many elements further along one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import contiguous_stride, dense_stride
from ..module import CutParam

if TYPE_CHECKING:  # importing it takes half a second, which is paid only to save or load directories
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a part of a tensor, in elements by dimension."""


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Yields the boxes that make up the elements ``[start, end)`` of a contiguous tensor, in order.

    Each is contiguous memory. Scalars (``shape == ()``) have one box.
    """
    if start >= end:
        return
    # The recursion ends here. A scalar is a box without dimensions, which the format writes and reads like any other.
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the complete rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, end - last * row)
        return
    # The end of a row, complete rows, and the beginning of a row; the first and the last are cut further inside.
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start < first * row else -1)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start, end):
        yield (row, *offsets), (1, *sizes)


def _with_own_storage(part: Tensor) -> Tensor:
    """Returns a 1-D view with a storage of exactly its elements, in the same memory. torch's writer copies every tensor
    whose storage is larger, and keeps all copies until the file is complete."""
    start = part.storage_offset() * part.itemsize
    storage = part.untyped_storage()[start : start + part.nbytes]
    return part.new_empty(0).set_(storage, 0, (part.numel(),), (1,))


class FlatShard(Tensor):
    """Elements ``[start, start + numel)`` of a tensor, in the order of its memory.

    It has the full tensor's shape and strides, the dtype and device of its pieces, and no other element. It can be
    saved, loaded into, copied and detached; any other operation raises.

    Args:
        pieces: 1-D tensors with the elements, one behind the other, or one tensor; not copied.
        start: the position of the first element, in memory order.
        part_shape: the shape of the full tensor, or of this tensor rank's part of it.
        part_stride: the strides of the same, dense.
        cut: the place of that part in the full tensor; None if the part is the full tensor.
    """

    pieces: tuple[Tensor, ...]
    numel_here: int
    start: int
    part_shape: tuple[int, ...]
    part_stride: tuple[int, ...]
    cut: CutParam | None

    @staticmethod
    def __new__(
        cls,
        pieces: Tensor | Sequence[Tensor],
        start: int,
        part_shape: tuple[int, ...],
        part_stride: tuple[int, ...],
        cut: CutParam | None = None,
    ) -> FlatShard:
        shape, stride = part_shape, part_stride
        if cut is not None:  # ranks agree on the full shape, but each may have different strides
            shape, stride = cut.shape, contiguous_stride(cut.shape)
        pieces = (pieces,) if isinstance(pieces, Tensor) else tuple(pieces)
        first = pieces[0]
        shard: FlatShard = Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=first.dtype, device=first.device, requires_grad=False
        )
        shard.pieces = pieces
        shard.numel_here = sum(piece.numel() for piece in pieces)
        shard.start = start
        shard.part_shape = part_shape
        shard.part_stride = part_stride
        shard.cut = cut
        return shard

    @classmethod
    def of_part(cls, part: Tensor, cut: CutParam) -> FlatShard:
        """Returns all of this tensor rank's part of a tensor; copied only if it overlaps itself or has holes."""
        if dense_stride(part.shape, part.stride()) != part.stride():
            part = part.contiguous()
        return cls(part.as_strided((part.numel(),), (1,)), 0, tuple(part.shape), part.stride(), cut)

    @property
    def local(self) -> Tensor:
        """The elements as one 1-D tensor: a copy if there are several pieces."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def as_part(self) -> Tensor:
        """Returns a complete part in its shape; a view of a single piece."""
        assert self.numel_here == math.prod(self.part_shape), "a range of it has no shape"
        return self.local.as_strided(self.part_shape, self.part_stride)

    def map(self, make: Callable[[Tensor], Tensor]) -> FlatShard:
        """Returns the same part of the same tensor, with ``make(piece)`` in place of each piece."""
        return FlatShard(
            [make(piece) for piece in self.pieces], self.start, self.part_shape, self.part_stride, self.cut
        )

    def _elements(self, start: int, end: int) -> Tensor:
        """Returns elements by their numbers in this shard: a view where they are in one piece."""
        views = []
        before = 0
        for piece in self.pieces:
            low = max(start - before, 0)
            high = min(end - before, piece.numel())
            if low < high:
                views.append(piece[low:high])
            before += piece.numel()
        if len(views) == 1:
            return _with_own_storage(views[0])
        return torch.cat(views) if views else self.pieces[0][:0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.start + self.numel_here
        of = "" if self.cut is None else f"{self.part_shape} at {self.cut.part[0]} of dimension {self.cut.dim} of "
        return f"FlatShard([{self.start}, {end}) of {of}{tuple(self.shape)}, {self.dtype}, {self.device})"

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.pieces[0])
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        order = self._memory_order()
        taken = 0
        # Boxes are one after the other in memory order, so counting elements finds each of them.
        # An index without an offset means the first one.
        for offsets, sizes in self._boxes():
            numel = math.prod(sizes)
            if index.offset is None or tuple(index.offset) == offsets:
                part = self._elements(taken, taken + numel).view([sizes[dim] for dim in order])
                return part.permute([order.index(dim) for dim in range(len(order))])
            taken += numel
        raise ValueError(f"{self!r} has no part at {index.offset}")

    def _memory_order(self) -> list[int]:
        """Returns the dimensions, slowest first."""
        shape, stride = self.part_shape, self.part_stride
        # A dimension of size one may have any stride; its place must not separate adjacent dimensions.
        return sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] == 1))

    def _boxes(self) -> list[Box]:
        """Returns the boxes of the full tensor, in memory order."""
        order, shape = self._memory_order(), self.part_shape
        back = [order.index(dim) for dim in range(len(order))]
        in_memory_order = boxes(tuple(shape[dim] for dim in order), self.start, self.start + self.numel_here)
        first = [0] * len(shape)
        if self.cut is not None:
            first[self.cut.dim] = self.cut.part[0]
        return [
            (
                tuple(offsets[place] + ahead for place, ahead in zip(back, first, strict=True)),
                tuple(sizes[place] for place in back),
            )
            for offsets, sizes in in_memory_order
        ]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        shard = args[0]
        aten = torch.ops.aten
        # Saving and loading need only these: a copy to the host, a new target, a copy into it. Code that computes would
        # see a part and not know it.
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            kwargs.pop("memory_format", None)
            return shard.map(lambda piece: func(piece, *args[1:], **kwargs))
        if func in (aten.new_empty.default, aten.empty_like.default, aten.zeros_like.default):  # as copying begins
            kwargs.pop("memory_format", None)
            return shard.map(lambda piece: torch.zeros_like(piece, **kwargs))
        if func is aten.copy_.default and isinstance(args[1], FlatShard) and args[1].numel_here == shard.numel_here:
            source = args[1].local
            for piece, values in zip(
                shard.pieces, source.split([piece.numel() for piece in shard.pieces]), strict=True
            ):
                piece.copy_(values, **kwargs)
            return shard
        raise NotImplementedError(
            f"{func} of {shard!r}: it is one rank's part of a tensor, to save and to load. Computing with it "
            "needs the optimizer's state_dict(), which is whole"
        )
