"""Gradients that pass through a few staging buffers and accumulate, reduced, in this rank's shards.

After Megatron-LLaMA's bucket pool (https://github.com/alibaba/Megatron-LLaMA, overlapped distributed optimizer).

[Note: what is held]
Between backwards: the sums, 1/d of each bucket. In a backward also ``.grad`` of the buckets that are not complete yet,
autograd's own, and up to ``NUM_STAGING_BUFFERS`` staging buffers, used in turn. Those are freed when the last bucket is
reduced, since activations, at their most when backward begins, have a use for the memory.

[Note: fragments]
A bucket holds whole parameters, so one may be many times ``bucket_size``. It is sent in pieces: piece j is the j-th
slice of every rank's shard, so that each rank receives slice j of its sums, and nobody's shard depends on the pieces.
The gradients of such a bucket are kept until its last piece is staged.

[Note: waiting in backward]
A rank that is ahead waits, inside backward, for reductions that all ranks must launch. Each launches them in the same
order and waits for earlier ones only, so none waits in a circle. A model whose backward has collectives of its own
(SyncBatchNorm) must not, in addition, leave different parameters unused on different ranks: the bucket of one is
launched at the end of that rank's backward, which the collective may keep it from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..layout import NUM_STAGING_BUFFERS, Bucket, BufferLayout
from ..module import LocalParts
from ..wire import round_in_place
from .grad_buffers import GradBuffers, copy_grad_
from .nonfinite import FiniteCheck
from .reduced_grad import ReducedGrad


@dataclasses.dataclass(frozen=True)
class _Copy:
    """Elements ``[start, end)`` of a staging buffer, filled from parameter ``param``, from element ``first`` on in its
    memory order; or the space between parameters (``param`` is None), which is sent as zeros."""

    start: int
    end: int
    param: int | None
    first: int


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The load of one collective: ``numel`` elements, and where they come from. Its result is added to elements
    ``[start, end)`` of a rank's shard."""

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
        self._sealed: dict[int, dict[int, Tensor]] = {}  # by bucket and parameter, what is not staged yet
        self._on_the_way: set[int] = set()  # buckets that are sealed and not published
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
            if isinstance(param.grad, ReducedGrad):  # what autograd adds is sent alone, and added to the sums
                param.grad = param.grad.take_pending()
            elif param.grad is not None:  # in place of what was summed; it is sent with what is added to it
                self.check_param(index)
                self.release_kept_grads([index])
                self._zero_sums(index)
                self.has_grad[index] = True

    def adopt_grad(self, param: int) -> None:
        """It stays where autograd put it, and is looked at when its bucket is sealed."""

    def add_to_reduced(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        for index in self.layout.buckets[bucket].params:
            self.params[index].grad = grads.get(index)

    def seal(self, bucket: int) -> None:
        sealed: dict[int, Tensor] = {}
        indices = self.layout.buckets[bucket].params
        grads = self.local_parts.local_grads([self.params[index] for index in indices])
        for index, grad in zip(indices, grads, strict=True):
            param = self.params[index]
            if grad is not None:
                self.check_param(index)
                sealed[index] = grad
                self.has_grad[index] = True
            # Also where this backward brought nothing: the sums of those before it are its gradient still.
            param.grad = self._stand_in(index) if self.has_grad[index] else None
        self._sealed[bucket] = sealed
        self._on_the_way.add(bucket)

    def find_nonfinite(self, bucket: int, check: FiniteCheck) -> None:
        # A finite gradient may be infinite in the 16 bits in which it is sent.
        sent = self.layout.buffers[self.layout.buckets[bucket].buffer].staging_dtype
        check.check_grads({i: self._flatten(i, grad).to(sent) for i, grad in self._sealed[bucket].items()}, self.layout)

    def num_pieces(self, bucket: int) -> int:
        return len(self._pieces[bucket])

    @torch.no_grad()
    def piece_to_reduce(self, bucket: int, piece: int) -> tuple[Tensor, Tensor]:
        pieces, grads = self._pieces[bucket], self._sealed[bucket]
        if piece == 0:  # not once for each piece, should it take a copy
            grads = self._sealed[bucket] = {index: self._flatten(index, grad) for index, grad in grads.items()}
        plan = pieces[piece]
        buffer = self.layout.buffers[self.layout.buckets[bucket].buffer]
        tensor = self._next_staging(plan.numel, buffer.staging_dtype)
        empty, filled, sources = list[Tensor](), list[Tensor](), list[Tensor]()
        for copy in plan.copies:
            grad = None if copy.param is None else grads.get(copy.param)
            if grad is None:
                # The staging buffer holds an earlier piece, which would be reduced once more, as another parameter's
                # gradient.
                empty.append(tensor[copy.start : copy.end])
            else:
                filled.append(tensor[copy.start : copy.end])
                sources.append(grad[copy.first : copy.first + copy.end - copy.start])
        # At once: a launch for each of thousands of parameters would take longer than the copies, in every microbatch.
        if empty:
            torch._foreach_zero_(empty)
        if filled:
            torch._foreach_copy_(filled, sources)
        # The last reference: autograd's memory goes back here, which is what pooling is for.
        if piece == len(pieces) - 1:
            del self._sealed[bucket]
        if buffer.staging_dtype != buffer.grad_wire_dtype:
            tensor = round_in_place(tensor, buffer.grad_wire_dtype)
        first = self._shards[bucket][0]
        return tensor, self.reduced(bucket, first + plan.start, first + plan.end)

    def publish(self, bucket: int) -> None:
        self._reduced[bucket] = True
        # Another rank may have used what this one has not; has_grad says so by now.
        self._show_reduced(self.layout.buckets[bucket].params)
        self._on_the_way.discard(bucket)
        # Between buckets they stay, or each piece would allocate anew.
        if not self._on_the_way:
            self._staging.clear()

    def _next_staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The staging buffer that was used longest ago; whoever sends has waited for what was in it."""
        made = len(self._staging)
        if made < len(self._staging_nbytes):
            self._staging.append(torch.empty(self._staging_nbytes[made], dtype=torch.uint8, device=self._device))
        else:
            self._staging.append(self._staging.pop(0))
        return self._staging[-1][: numel * dtype.itemsize].view(dtype)

    def _flatten(self, index: int, grad: Tensor) -> Tensor:
        """A gradient as 1-D, in its parameter's memory order: a view where it lies so, as autograd makes it."""
        spec = self.layout.params[index]
        # Sparse, expanded or transposed: autograd hands over whatever the last operation made.
        if grad.layout != torch.strided or grad.stride() != spec.stride:
            dense = torch.empty_strided(spec.shape, spec.stride, dtype=spec.grad_dtype, device=self._device)
            copy_grad_(dense, grad)
            grad = dense
        return grad.as_strided((spec.numel,), (1,))

    # --- between backwards -------------------------------------------------------------------------------------------

    def _take_written(self, param: int, grad: Tensor) -> None:
        part, owned = self.local_parts.local_grad(self.params[param]), self.layout.owned_range(param, self._dp_rank)
        assert part is not None
        if owned is not None:
            slot = self.layout.slots[param]
            flat = self._flatten(param, part)
            self.reduced(slot.bucket, *owned).copy_(flat[owned[0] - slot.start : owned[1] - slot.start])

    def drop_unfinished(self) -> None:
        super().drop_unfinished()
        self._sealed.clear()
        self._on_the_way.clear()
        self._staging.clear()

    def close(self, *, keeps_grads: bool = False) -> None:
        super().close(keeps_grads=keeps_grads)
        self._staging, self._sealed = [], {}
        self._on_the_way.clear()


def _plan_piece(layout: BufferLayout, bucket: Bucket, start: int, end: int) -> _Piece:
    """Plans the piece with elements ``[start, end)`` of every shard of the bucket, one shard's after the other's."""
    shard_numel = bucket.shard_numel
    copies: list[_Copy] = []
    staged = 0
    # the shards lie side by side: all of them are one stretch
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
                # The space between aligned parameters is sent too; left out, it would keep what the buffer held before.
                if position < first:
                    copies.append(_Copy(position + shift, first + shift, None, 0))
                copies.append(_Copy(first + shift, last + shift, index, first - slot.start))
                position = last
        if position < stretch_end:
            copies.append(_Copy(position + shift, stretch_end + shift, None, 0))
        staged += stretch_end - stretch_start
    return _Piece(start, end, staged, tuple(copies))
