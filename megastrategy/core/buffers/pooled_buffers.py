"""Gradients that pass through a few staging buffers and accumulate, reduced, in this rank's shards.

After Megatron-LLaMA's bucket pool (https://github.com/alibaba/Megatron-LLaMA, overlapped distributed optimizer).

[Note: memory of pooled gradients]
Between backwards: the sums, 1/d of each bucket. In a backward also autograd's own ``.grad`` of buckets that are not
complete yet, and up to ``NUM_STAGING_BUFFERS`` staging buffers, used in turn. Those are freed when the last bucket is
reduced, since activations need the memory most when backward begins.

[Note: pieces of a bucket]
A bucket contains whole parameters, so it may be many times larger than ``bucket_size``. It is sent in pieces: piece j
is the j-th slice of every rank's shard, so each rank receives slice j of its sums, and shards do not depend on pieces.
The gradients of such a bucket are kept until its last piece is copied to a staging buffer.

[Note: no deadlock while backward waits]
A rank that is ahead waits, inside backward, for reductions that all ranks must launch. Each launches them in the same
order and waits only for earlier ones, so ranks never wait for each other in a circle. A model whose backward has
collectives of its own (SyncBatchNorm) must not, in addition, leave different parameters unused on different ranks: the
bucket of such a parameter is launched at the end of that rank's backward, which the collective may keep it from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..layout import NUM_STAGING_BUFFERS, Bucket, BufferLayout
from ..module import LocalParts
from .grad_buffers import GradBuffers, copy_grad_
from .nonfinite import FiniteCheck
from .reduced_grad import ReducedGrad


@dataclasses.dataclass(frozen=True)
class _Copy:
    """Elements ``[start, end)`` of a staging buffer, copied from parameter ``param``, from element ``first`` on in its
    memory order; or padding between parameters (``param`` is None), which is sent as zeros."""

    start: int
    end: int
    param: int | None
    first: int


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The input of one collective: ``numel`` elements and their sources. The result is added to elements ``[start,
    end)`` of a rank's shard."""

    start: int
    end: int
    numel: int
    copies: tuple[_Copy, ...]


class PooledGradBuffers(GradBuffers):
    """``.grad`` is autograd's own until its bucket is sealed, and a stand-in after every backward.

    Owns, for each bucket, ``bucket.numel / d`` elements of the sum dtype on ``device``; and ``NUM_STAGING_BUFFERS``
    staging buffers of one piece each while a backward is reduced.
    """

    reduces_every_backward = True
    max_in_flight = NUM_STAGING_BUFFERS

    def __init__(self, dp_rank: int, device: torch.device, parts: LocalParts) -> None:
        super().__init__(dp_rank, device, parts)
        self._pieces: list[list[_Piece]] = []
        # By bucket from its seal to its publication, the gradients that are not in a staging buffer yet.
        self._sealed: dict[int, dict[int, Tensor]] = {}
        self._staging: list[Tensor] = []  # 1-D bytes, the next to be used first

    def _place(self, first: int, grads: Sequence[Tensor | None]) -> None:
        for bucket in self.layout.buckets[len(self._pieces) :]:
            self._pieces.append([_plan_piece(self.layout, bucket, *span) for span in self.layout.pieces(bucket)])
        self._staging_nbytes = self.layout.staging_nbytes
        for index, grad in enumerate(grads, first):
            if grad is not None:
                self.params[index].grad = grad.to(self.layout.params[index].grad_dtype)
                self.has_grad[index] = True

    # --- one backward ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._notice_drops(range(len(self.params)))
        for bucket in self.layout.buckets:
            self._zero_stale(bucket.index)
        for index, param in enumerate(self.params):
            if isinstance(param.grad, ReducedGrad):  # only autograd's addition is sent, and added to the sums
                param.grad = param.grad.take_pending()
            elif param.grad is not None:  # replaces the sums; it is sent with the gradients that are added to it
                self._check_param(index)
                self._zero_sums(index)
                self.has_grad[index] = True

    def adopt_grad(self, param: int) -> None:
        """Leaves it in ``.grad``, where :meth:`seal` reads it."""

    def add_to_reduced(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        for index in self.layout.buckets[bucket].params:
            self.params[index].grad = grads.get(index)

    def seal(self, bucket: int) -> None:
        sealed = self._sealed[bucket] = dict[int, Tensor]()
        indices = self.layout.buckets[bucket].params
        grads = self.local_parts.local_grads([self.params[index] for index in indices])
        for index, grad in zip(indices, grads, strict=True):
            param = self.params[index]
            if grad is not None:
                self._check_param(index)
                sealed[index] = grad
                self.has_grad[index] = True
            # Also without a gradient in this backward: the sums of earlier ones are its gradient.
            param.grad = self._stand_in(index) if self.has_grad[index] else None

    def find_nonfinite(self, bucket: int, check: FiniteCheck) -> None:
        # A finite gradient may be infinite in the 16 bits in which it is sent.
        sent = self.layout.buffers[self.layout.buckets[bucket].buffer].grad_wire_dtype
        grads = {index: self._flatten(index, grad).to(sent) for index, grad in self._sealed[bucket].items()}
        check.check_grads(grads, self.layout)

    def num_pieces(self, bucket: int) -> int:
        return len(self._pieces[bucket])

    @torch.no_grad()
    def piece_to_reduce(self, bucket: int, piece: int) -> tuple[Tensor, Tensor]:
        pieces, grads = self._pieces[bucket], self._sealed[bucket]
        if piece == 0:  # once for all pieces, since it may copy
            grads = self._sealed[bucket] = {index: self._flatten(index, grad) for index, grad in grads.items()}
        plan = pieces[piece]
        buffer = self.layout.buffers[self.layout.buckets[bucket].buffer]
        tensor = self._next_staging(plan.numel, buffer.grad_wire_dtype)
        empty, filled, sources = list[Tensor](), list[Tensor](), list[Tensor]()
        for copy in plan.copies:
            grad = grads.get(copy.param) if copy.param is not None else None
            if grad is None:
                # Zeroed, since the staging buffer has the gradients of an earlier piece, which would be reduced once
                # more, as those of another parameter.
                empty.append(tensor[copy.start : copy.end])
            else:
                filled.append(tensor[copy.start : copy.end])
                sources.append(grad[copy.first : copy.first + copy.end - copy.start])
        # At once: a launch for each of thousands of parameters would take longer than the copies, in every microbatch.
        if empty:
            torch._foreach_zero_(empty)
        if filled:
            torch._foreach_copy_(filled, sources)
        # The last references: autograd's memory is freed here, which is the purpose of pooling.
        if piece == len(pieces) - 1:
            self._sealed[bucket] = {}
        first = self._buckets[bucket].shard[0]
        return tensor, self.reduced(bucket, first + plan.start, first + plan.end)

    def publish(self, bucket: int) -> None:
        self._buckets[bucket].is_reduced = True
        # Another rank may have used parameters that this one has not; has_grad includes those by now.
        self._show_reduced(self.layout.buckets[bucket].params)
        self._sealed.pop(bucket, None)
        # Not between buckets, or each piece would allocate anew.
        if not self._sealed:
            self._staging.clear()

    def _next_staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the staging buffer that was used longest ago; the sender has waited for its last piece."""
        made = len(self._staging)
        if made < len(self._staging_nbytes):
            self._staging.append(torch.empty(self._staging_nbytes[made], dtype=torch.uint8, device=self._device))
        else:
            self._staging.append(self._staging.pop(0))
        return self._staging[-1][: numel * dtype.itemsize].view(dtype)

    def _flatten(self, index: int, grad: Tensor) -> Tensor:
        """Returns a gradient as 1-D, in its parameter's memory order: a view if it has that order, as it mostly has."""
        spec = self.layout.params[index]
        # Sparse, expanded or transposed: autograd passes on the result of the last operation as it is.
        if grad.layout != torch.strided or grad.stride() != spec.stride:
            dense = torch.empty_strided(spec.shape, spec.stride, dtype=spec.grad_dtype, device=self._device)
            copy_grad_(dense, grad)
            grad = dense
        return grad.as_strided((spec.numel,), (1,))

    # --- between backwards -------------------------------------------------------------------------------------------

    def _take_written(self, param: int, grad: Tensor) -> None:
        part, sums = self.local_parts.local_grad(self.params[param]), self.owned(param)
        assert part is not None
        if sums is not None:
            start, end = self.layout.owned_range(param, self._dp_rank) or (0, 0)
            slot = self.layout.slots[param]
            sums.copy_(self._flatten(param, part)[start - slot.start : end - slot.start])

    def drop_unfinished(self) -> None:
        super().drop_unfinished()
        self._sealed.clear()
        self._staging.clear()

    def close(self, *, keeps_grads: bool = False) -> None:
        super().close(keeps_grads=keeps_grads)
        self._staging, self._sealed = [], {}


def _plan_piece(layout: BufferLayout, bucket: Bucket, start: int, end: int) -> _Piece:
    """Plans the piece with elements ``[start, end)`` of every shard of the bucket, shard after shard."""
    shard_numel = bucket.shard_numel
    copies: list[_Copy] = []
    staged = 0
    # The shards are adjacent: all of them are one stretch.
    stretches = (
        [(bucket.start, bucket.end)]
        if (start, end) == (0, shard_numel)
        else [
            (bucket.start + shard * shard_numel + start, bucket.start + shard * shard_numel + end)
            for shard in range(bucket.domain.num_shards)
        ]
    )
    for stretch_start, stretch_end in stretches:
        shift, position = staged - stretch_start, stretch_start
        for index in bucket.params:
            slot = layout.slots[index]
            first, last = max(slot.start, stretch_start), min(slot.end, stretch_end)
            if first < last:
                # The padding between parameters is sent too. Not copied, it would have the values of an earlier piece.
                if position < first:
                    copies.append(_Copy(position + shift, first + shift, None, 0))
                copies.append(_Copy(first + shift, last + shift, index, first - slot.start))
                position = last
        if position < stretch_end:
            copies.append(_Copy(position + shift, stretch_end + shift, None, 0))
        staged += stretch_end - stretch_start
    return _Piece(start, end, staged, tuple(copies))
