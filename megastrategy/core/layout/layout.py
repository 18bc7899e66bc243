"""The layout: the address of every gradient element, its owner, and the bucket that carries it. No tensors.

The layout is a pure function of parameter specs, configuration and ``dp_size``. Every rank computes it by itself, and
ranks compare a digest before the first collective. Rules, after Megatron-LM's ``_ParamAndGradBuffer``
(https://github.com/NVIDIA/Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py):

* parameters are laid out in reverse order of registration, which is about the order in which backward finishes them, or
  in the order that was observed (:mod:`~megastrategy.core.layout.arrival_order`);
* each pair of parameter dtype and gradient dtype has one buffer;
* a parameter starts on a multiple of 64 elements, and so does every shard; a bucket ends on a multiple of
  ``lcm(dp_size, 128)``, so that its shards have the same size;
* weights of a recurrent layer that share one chunk of memory stay in one chunk, which is aligned as
  a parameter is (:mod:`~megastrategy.core.layout.recurrent_weights`);
* with the distributed optimizer rank r owns the r-th of ``dp_size`` equal parts of every bucket, otherwise all of it;
* with n instances of the optimizer each n-th of the ranks is ``num_shards`` consecutive ones, and rank r owns the ``r %
  num_shards``-th of ``num_shards`` parts: every part has n owners with the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .domain import Domain
from .recurrent_weights import ChunkPlace

# 128 bytes in 16 bits: every view starts on a cache line, as kernels that load vectors expect.
PARAM_ALIGNMENT_NUMEL = 64
# Shards are aligned as well, for collectives and optimizers. NCCL moves data that does not start on 16 bytes element by
# element, and Megatron-LM's lcm(dp_size, 128) by itself aligns a shard of 128 ranks to one element.
SHARD_ALIGNMENT_NUMEL = 64
# 256 bytes in 16 bits: Megatron-LM's number, for which cuBLAS may choose faster algorithms.
BUCKET_ALIGNMENT_NUMEL = 128
NUM_STAGING_BUFFERS = 2
"""The maximum number of pieces that are in flight at once, with pooled gradients. Two is the minimum that keeps
the wire busy: while one piece is sent the next is queued behind it, and the one after that is copied in time if
its gradients have arrived. If gradients arrive faster than they are sent, backward waits, and a longer queue
would not end earlier."""
NUM_RECEIVE_BUFFERS = 2
"""The number of buckets (or pieces) for which there is memory to receive the other ranks' parts, where these are added
up here: one is added up while the next is received."""
SIXTEEN_BIT_DTYPES = (torch.float16, torch.bfloat16)

CHUNKS_HEADING = "weight in a chunk (name, chunk, first element, elements of the chunk)"
"""The heading of the chunked weights in :meth:`BufferLayout.describe`."""

Spans = Sequence[Sequence[tuple[int, int]]]
"""By rank, parts ``[start, end)`` of a tensor."""


class Part(NamedTuple):
    """Elements ``[start, end)`` of a buffer, of one parameter."""

    param: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """A trainable parameter as the layout sees it.

    ``stride`` (elements) is the parameter's own if its memory is dense, so that channels_last stays channels_last;
    otherwise strides are contiguous. ``chunk``: see recurrent_weights' [Note: weights in one chunk]. ``reserved_numel``
    elements are reserved for it; see local_parts' [Note: one layout on all tensor ranks]. ``domain``: the ranks that
    hold the same elements; None if all data-parallel ranks do.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad_dtype: torch.dtype
    chunk: ChunkPlace | None = None
    reserved_numel: int = 0  # at least numel: see __post_init__
    needs_own_bucket: bool = False
    domain: Domain | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reserved_numel", max(self.reserved_numel, self.numel))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def has_main_param(self) -> bool:
        """Whether the optimizer steps an fp32 copy of the parameter."""
        return self.dtype in SIXTEEN_BIT_DTYPES


@dataclasses.dataclass(frozen=True)
class ParamSlot:
    """The place of one parameter: elements ``[start, end)`` of buffer ``buffer``, inside bucket ``bucket``."""

    buffer: int
    bucket: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Elements ``[start, end)`` of buffer ``buffer``, reduced by one collective.

    ``index`` is its place in the launch order. ``params`` are indices into :attr:`BufferLayout.params`, in the order of
    their addresses; the ranks of ``domain`` reduce it.
    """

    index: int
    buffer: int
    start: int
    end: int
    params: tuple[int, ...]
    domain: Domain

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def shard_numel(self) -> int:
        """The elements that each owner owns."""
        return self.numel // self.domain.num_shards


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Contiguous memory for all parameters of one dtype and domain whose gradients have one dtype.

    ``sum_dtype`` is that of reduced gradients. With ``has_separate_sums`` a rank's shards of these have memory of their
    own, to which each reduction adds; otherwise the sums replace the gradients in the buffer. Gradients are sent in
    ``grad_wire_dtype``.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    numel: int
    domain: Domain
    sum_dtype: torch.dtype
    has_separate_sums: bool
    grad_wire_dtype: torch.dtype

    @property
    def shard_numel(self) -> int:
        """The elements that each owner owns."""
        return self.numel // self.domain.num_shards


@dataclasses.dataclass(frozen=True)
class BufferLayout:
    """The whole plan. It validates itself when it is made, and no offset is computed after it.

    Args:
        params: every trainable parameter once, in order of registration.
        slots: the place of each parameter, in the same order.
        buffers: one for each (dtype, grad dtype, domain).
        buckets: in launch order.
        domain: all data-parallel ranks, and the number of equal shards of a bucket.
        piece_numel: with pooled gradients the maximum number of elements of one collective; None
            where gradients have buffers.
        offloads_state: whether per-element state of sharded parameters is in host memory between steps.
    """

    params: tuple[ParamSpec, ...]
    slots: tuple[ParamSlot, ...]
    buffers: tuple[Buffer, ...]
    buckets: tuple[Bucket, ...]
    domain: Domain
    piece_numel: int | None = None
    offloads_state: bool = False

    def __post_init__(self) -> None:
        alignment = bucket_alignment(self.dp_size, self.num_shards)
        ends = [0] * len(self.buffers)
        # By address, not by launch order, so that a gap, which no rank would reduce or own, is found.
        for bucket in sorted(self.buckets, key=lambda bucket: (bucket.buffer, bucket.start)):
            assert bucket.start == ends[bucket.buffer], "buckets cover a buffer without gap or overlap"
            assert bucket.numel % alignment == 0, "a bucket divides into equal shards"
            ends[bucket.buffer] = bucket.end
            position = bucket.start
            for index in bucket.params:
                slot = self.slots[index]
                chunk = self.params[index].chunk
                assert position <= slot.start <= slot.end <= bucket.end, "parameters are in their bucket, apart"
                first = slot.start - (0 if chunk is None else chunk.start)
                assert first % PARAM_ALIGNMENT_NUMEL == 0, "parameters, or their chunks, are aligned"
                assert chunk is None or bucket.start <= first <= first + chunk.numel <= bucket.end, "chunks are whole"
                assert slot.end - slot.start == self.params[index].numel
                assert (slot.buffer, slot.bucket) == (bucket.buffer, bucket.index)
                position = slot.end
        assert ends == [buffer.numel for buffer in self.buffers], "buckets end where their buffer ends"
        assert [bucket.index for bucket in self.buckets] == list(range(len(self.buckets)))
        placed = sorted(index for bucket in self.buckets for index in bucket.params)
        assert placed == list(range(len(self.params))), "every parameter is in exactly one bucket"
        assert self.piece_numel is None or self.piece_numel % alignment == 0, "a piece divides into equal shards"

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.domain.size

    @property
    def num_shards(self) -> int:
        """The number of parts in which a bucket of parameters that all ranks hold is owned; 1 without shards."""
        return self.domain.num_shards

    @property
    def num_instances(self) -> int:
        """The number of ranks that own the same elements."""
        return self.domain.num_instances

    @property
    def domains(self) -> list[Domain]:
        """The domains of all buckets, that of all ranks first."""
        return list(dict.fromkeys((self.domain, *(bucket.domain for bucket in self.buckets))))

    @property
    def is_pooled(self) -> bool:
        """Whether gradients have no buffers of their own, and are reduced in every backward."""
        return self.piece_numel is not None

    @functools.cached_property
    def main_dtype(self) -> torch.dtype:
        """The widest dtype that an optimizer steps: 16-bit parameters have fp32 main params."""
        return torch.float64 if any(spec.dtype == torch.float64 for spec in self.params) else torch.float32

    @functools.cached_property
    def norm_dtype(self) -> torch.dtype:
        """The dtype of gradient norms: fp64 if a gradient has it."""
        return torch.float64 if any(spec.grad_dtype == torch.float64 for spec in self.params) else torch.float32

    @functools.cached_property
    def has_copies(self) -> bool:
        """Whether other pipeline stages have some of the parameters, too."""
        return any(spec.needs_own_bucket for spec in self.params)

    def pieces(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Divides every shard of the bucket into parts ``[start, end)``, one for each collective: as few, and as equal,
        as give the parts of all shards together at most ``piece_numel`` elements."""
        shard_numel = bucket.shard_numel
        if self.piece_numel is None or bucket.numel == 0:
            return [(0, shard_numel)]
        # Equal pieces rather than full ones and a rest: the last piece is exposed, and a small rest still costs the
        # latency. Equal up to the alignment, or the sums of all pieces after the first would be misaligned.
        num_pieces = -(-bucket.numel // self.piece_numel)
        numel = round_up(-(-shard_numel // num_pieces), SHARD_ALIGNMENT_NUMEL)
        return [(start, min(start + numel, shard_numel)) for start in range(0, shard_numel, numel)]

    @property
    def staging_nbytes(self) -> list[int]:
        """The bytes of each staging buffer, which has the size of the largest piece."""
        nbytes = [numel * buffer.grad_wire_dtype.itemsize for buffer, numel in self._piece_numels()]
        return _largest_for_each_of(nbytes, NUM_STAGING_BUFFERS) if self.is_pooled else []

    @property
    def received_nbytes(self) -> list[int]:
        """The bytes of the buffers for parts that are summed in a wider dtype; see part_exchange's [Note: receive
        buffers]."""
        nbytes = [
            numel * buffer.grad_wire_dtype.itemsize
            for buffer, numel in self._piece_numels()
            if buffer.has_separate_sums
        ]
        return _largest_for_each_of(nbytes, NUM_RECEIVE_BUFFERS)

    def _piece_numels(self) -> Iterator[tuple[Buffer, int]]:
        for bucket in self.buckets:
            for start, end in self.pieces(bucket):
                yield self.buffers[bucket.buffer], (end - start) * bucket.domain.num_shards

    def shard_range(self, bucket: Bucket, dp_rank: int) -> tuple[int, int]:
        """Returns the elements ``[start, end)`` of the bucket's buffer that ``dp_rank`` owns."""
        start = bucket.start + bucket.domain.shard_of(dp_rank) * bucket.shard_numel
        return start, start + bucket.shard_numel

    def owned_range(self, param: int, dp_rank: int) -> tuple[int, int] | None:
        """Returns the part ``[start, end)`` of the parameter's slot (buffer offsets) that ``dp_rank`` owns, or None."""
        slot = self.slots[param]
        bucket = self.buckets[slot.bucket]
        shard_start, shard_end = self.shard_range(bucket, dp_rank)
        if slot.start == slot.end:  # no elements, but its step counter needs an owner
            return (slot.start, slot.end) if bucket.domain.shard_of(dp_rank) == 0 else None
        # A parameter may span several shards, and then has several owners.
        start = max(slot.start, shard_start)
        end = min(slot.end, shard_end)
        return (start, end) if start < end else None

    def holders(self, param: int) -> Iterator[tuple[int, Part]]:
        """Yields the ranks of an instance that own a part of the parameter's slot, by address, with that part; nothing
        for a parameter without elements."""
        slot = self.slots[param]
        bucket = self.buckets[slot.bucket]
        start = slot.start
        while start < slot.end:
            rank = (start - bucket.start) // bucket.shard_numel
            end = min(slot.end, bucket.start + (rank + 1) * bucket.shard_numel)
            yield rank, Part(param, start, end)
            start = end

    @property
    def param_order(self) -> list[int]:
        """All parameters, bucket after bucket in launch order, and by address in each bucket."""
        return [index for bucket in self.buckets for index in bucket.params]

    def extended_by(self, other: BufferLayout) -> BufferLayout:
        """Returns this plan with ``other``'s parameters, buffers and buckets after its own, which keep their places.

        So no shard moves when parameters join a model during training. Their buckets are launched last.
        """
        # Owners follow from rank and place: with different numbers the two halves would have different owners.
        assert self.domain == other.domain
        num_params = len(self.params)
        num_buffers = len(self.buffers)
        num_buckets = len(self.buckets)
        slots = [
            dataclasses.replace(slot, buffer=slot.buffer + num_buffers, bucket=slot.bucket + num_buckets)
            for slot in other.slots
        ]
        buckets = [
            dataclasses.replace(
                bucket,
                index=bucket.index + num_buckets,
                buffer=bucket.buffer + num_buffers,
                params=tuple(index + num_params for index in bucket.params),
            )
            for bucket in other.buckets
        ]
        return dataclasses.replace(
            self,
            params=self.params + other.params,
            slots=(*self.slots, *slots),
            buffers=self.buffers + other.buffers,
            buckets=(*self.buckets, *buckets),
        )

    def describe(self) -> dict[str, list[list[object]]]:
        """Lists the facts that ranks must agree on as JSON-able rows. Parameters come first: they explain later
        differences."""
        # Ranks have parts of different sizes of a divided parameter, in places of one size.
        specs: list[list[object]] = [
            [
                s.name,
                *((list(s.shape), list(s.stride)) if s.domain is None else (s.reserved_numel, len(s.domain.groups))),
                str(s.dtype),
                str(s.grad_dtype),
            ]
            for s in self.params
        ]
        return {
            "parameter (name, shape, stride, dtype, gradient dtype)": specs,
            CHUNKS_HEADING: [[s.name, *dataclasses.astuple(s.chunk)] for s in self.params if s.chunk is not None],
            "number of ranks and of shards": [[self.dp_size, self.num_shards]],
            "place (name, bucket, first element)": self.describe_places(),
            "bucket (index, buffer, start, end)": [[b.index, b.buffer, b.start, b.end] for b in self.buckets],
        }

    def describe_places(self) -> list[list[object]]:
        """Returns the rows of :meth:`describe` that tensor ranks must agree on, too."""
        return [[s.name, slot.bucket, slot.start] for s, slot in zip(self.params, self.slots, strict=True)]


def _largest_for_each_of(nbytes: Sequence[int], number: int) -> list[int]:
    """Returns the largest size for every buffer: they are used in turn, and any of them may get the largest piece."""
    return [max(nbytes)] * min(number, len(nbytes)) if nbytes else []


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def bucket_alignment(dp_size: int, num_shards: int) -> int:
    """Returns the divisor of a bucket's number of elements that makes its shards equal and aligned."""
    # An all-reduce has no shards to align.
    shards = num_shards * SHARD_ALIGNMENT_NUMEL if num_shards > 1 else 1
    return math.lcm(dp_size, BUCKET_ALIGNMENT_NUMEL, shards)
