"""Buckets whose gradients pass through staging buffers, and accumulate, reduced, in this rank's shards.

After Megatron-LLaMA's bucket pool (https://github.com/alibaba/Megatron-LLaMA, overlapped distributed optimizer). Every
backward is reduced, under ``no_sync`` too.

[Note: memory of pooled gradients]
Between backwards: the sums, 1/d of each bucket. In a backward also autograd's own ``.grad`` of buckets that are not
complete yet, and the staging buffers.

[Note: pieces of a bucket]
A bucket contains whole parameters, so it may be many times larger than ``bucket_size``. It is sent in pieces: piece j
is the j-th slice of every rank's shard, so each rank receives slice j of its sums, and shards do not depend on pieces.
The gradients of such a bucket are kept until its last piece is copied to a staging buffer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..collectives import Handle, Handles
from ..events import EventKind, emit
from ..layout import Bucket as BucketPlan
from ..layout import BufferLayout
from .bucket import Bucket, State, get_grad
from .memory import Memory
from .nonfinite import FiniteCheck
from .reduced_grad import ReducedGrad

_Source = tuple[int | None, int]
"""A place and the number of its first element; None for the padding between parameters, which is sent as zeros."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The input of one collective: the sizes of its parts, in order, and where each comes from.

    The result is added to elements ``[start, end)`` of a rank's shard.
    """

    start: int
    end: int
    sizes: list[int]
    sources: list[_Source]


class PooledBucket(Bucket):
    """A bucket whose ``.grad`` is autograd's own until it is complete, and the stand-in of the sums after it."""

    def __init__(self, plan: BucketPlan, memory: Memory, *args: Any) -> None:
        super().__init__(plan, memory, *args)
        assert memory.pool is not None, "the plan is pooled"
        self._pool = memory.pool
        self._staging_nbytes = memory.layout.staging_nbytes
        self._pieces = [_plan_piece(memory.layout, plan, *span) for span in memory.layout.pieces(plan)]
        self._sealed: dict[int, Tensor] = {}  # 1-D gradients that are not in a staging buffer yet, by place
        self._handles: list[Handle] = []

    def open(self, *, has_grads: bool) -> None:
        """Begins a backward, which adds to the sums of gradients that were not dropped or replaced."""
        flags = self.reduced_flags()
        if not any(flags):
            self.shard.zero_()
        elif not all(flags):
            for place, is_kept in enumerate(flags):
                if not is_kept:
                    self._zero_reduced(place)
        self.state = State.OPEN
        super().open(has_grads=has_grads)

    def collect(self) -> bytes:
        """Takes the gradients out of ``.grad``, and those that were added to stand-ins."""
        grads = list(map(get_grad, self.params))
        used = bytes(grad is not None for grad in grads)
        for param, grad in zip(self.params, grads, strict=True):
            if isinstance(grad, ReducedGrad):
                param.grad = grad.take_pending()
        places = [place for place, param in enumerate(self.params) if param.grad is not None]
        local = self._parts.local_grads([self.params[place] for place in places])
        pairs = zip(places, local, strict=True)
        self._sealed = {place: self._flatten(place, grad) for place, grad in pairs if grad is not None}
        return used

    def _flatten(self, place: int, grad: Tensor) -> Tensor:
        """Returns a gradient as 1-D, in its parameter's memory order: a view if it has that order, as it mostly has."""
        spec = self.specs[place]
        # Sparse, expanded or transposed: autograd passes on the result of the last operation as it is.
        if grad.layout != torch.strided or grad.stride() != spec.stride:
            dense = torch.empty_strided(spec.shape, spec.stride, dtype=spec.grad_dtype, device=grad.device)
            grad = dense.copy_(grad if grad.layout == torch.strided else grad.to_dense())
        return grad.detach().as_strided((spec.numel,), (1,))

    def check_finite(self, check: FiniteCheck) -> None:
        sent = {self.plan.params[place]: grad.to(self._wire_dtype) for place, grad in self._sealed.items()}
        check.check_grads(sent, self._layout)

    @property
    def launches_at_once(self) -> bool:
        return self._pool.has_space_for(len(self._pieces))

    def launch(self) -> None:
        emit(self._listener, EventKind.REDUCE_START, self.plan.index)
        if self._handles:
            # A launch that raised has left pieces in flight, which add to the same memory.
            Handles(self._handles).wait()
            self._finish_pieces()
        for piece in self._pieces:
            numel = sum(piece.sizes)
            staged = self._pool.take(numel, self._wire_dtype, self._staging_nbytes, self._listener)
            self._fill(staged, piece)
            if piece is self._pieces[-1]:
                self._sealed = {}  # the last references: autograd's memory is freed here, the purpose of pooling
            sums = self.shard[piece.start : piece.end]
            self._handles.append(self._ranks.reduce_scatter_into(sums, staged, self._mean))
            self._pool.add(self._handles[-1])
        self._work = Handles(self._handles)
        self._end_launch()

    def _fill(self, staged: Tensor, piece: _Piece) -> None:
        empty = []
        filled = []
        sources = []
        for part, (place, first) in zip(staged.split(piece.sizes), piece.sources, strict=True):
            grad = None if place is None else self._sealed.get(place)
            if grad is None:
                # The staging buffer has gradients of an earlier piece, which would be reduced once more.
                empty.append(part)
            else:
                filled.append(part)
                sources.append(grad[first : first + part.numel()])
        if empty:
            torch._foreach_zero_(empty)
        if filled:
            torch._foreach_copy_(filled, sources)

    def wait(self) -> None:
        super().wait()
        self._finish_pieces()

    def _finish_pieces(self) -> None:
        self._pool.finish(self._handles)
        self._handles = []

    def reduce_again(self) -> None:
        self._reduce_late()

    def drop(self) -> None:
        super().drop()
        self._sealed = {}


def _plan_piece(layout: BufferLayout, bucket: BucketPlan, start: int, end: int) -> _Piece:
    """Plans the piece with elements ``[start, end)`` of every shard of the bucket, shard after shard."""
    numel = bucket.shard_numel
    firsts = [bucket.start + shard * numel for shard in range(bucket.domain.num_shards)]
    spans = [(first + start, first + end) for first in firsts]
    if (start, end) == (0, numel):
        spans = [(bucket.start, bucket.end)]
    piece = _Piece(start, end, [], [])
    for position, span_end in spans:
        for place, index in enumerate(bucket.params):
            slot = layout.slots[index]
            first = max(slot.start, position)
            last = min(slot.end, span_end)
            if first >= last:
                continue
            _add(piece, first - position, (None, 0))
            _add(piece, last - first, (place, first - slot.start))
            position = last
        _add(piece, span_end - position, (None, 0))
    return piece


def _add(piece: _Piece, size: int, source: _Source) -> None:
    if size > 0:
        piece.sizes.append(size)
        piece.sources.append(source)
