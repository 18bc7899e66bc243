"""The layout: an address for every gradient element, its owner, and the bucket that carries it. No tensors.

The layout is a pure function of parameter specs, configuration and ``dp_size``; all ranks compute it alone and
compare a digest before the first collective. Rules, after Megatron-LM's ``_ParamAndGradBuffer``
(https://github.com/NVIDIA/Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py):

* parameters are laid out in reverse order of registration, which is about the order in which backward finishes them,
  or in the order that was seen (:mod:`~megastrategy.core.layout.arrival_order`);
* one buffer for each pair of parameter dtype and gradient dtype;
* a parameter starts on a multiple of 64 elements, and so does every shard; a bucket ends on a multiple of
  ``lcm(dp_size, 128)``, so that its shards have the same size;
* weights of a recurrent layer that are one chunk stay one, which starts so
  (:mod:`~megastrategy.core.layout.recurrent_weights`);
* with the distributed optimizer rank r owns the r-th of ``dp_size`` equal parts of every bucket, otherwise all of it;
* with n instances of it the ranks are n times ``num_shards`` consecutive ones, and rank r owns the
  ``r % num_shards``-th of ``num_shards`` parts: every part has n owners, which hold the same bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from ..wire import wire_nbytes
from .domain import Domain
from .recurrent_weights import ChunkPlace

# 128 bytes in 16 bits: every view starts on a cache line, as kernels that load vectors expect. And a block of
# wire's, which two parameters, or two owners, would else share.
PARAM_ALIGNMENT_NUMEL = 64
# The same for a shard, which collectives and optimizers work on. NCCL moves what does not start on 16 bytes element by
# element, and Megatron-LM's lcm(dp_size, 128) alone leaves a shard of 128 ranks a multiple of one element.
SHARD_ALIGNMENT_NUMEL = 64
# 256 bytes in 16 bits: Megatron-LM's number, with which cuBLAS may pick its faster algorithms.
BUCKET_ALIGNMENT_NUMEL = 128
NCCL_ALIGNMENT_NUMEL = 2**16
"""The alignment of a bucket with ``pad_buckets_for_high_nccl_busbw``: Megatron-LM's number."""
NUM_STAGING_BUFFERS = 2
"""The most pieces of buckets that may be on their way at once, with pooled gradients. Two are the fewest that keep the
wire busy: while one piece is sent the next is queued behind it, and the one after that is staged in time if its
gradients are there. If they come faster than the wire takes them, backward waits, and a longer queue would end no
earlier."""
NUM_RECEIVE_BUFFERS = 2
"""The number of buckets (or pieces) whose parts from other ranks there is memory for, where they are added up here: one
is added up while the next comes in."""
SIXTEEN_BIT_DTYPES = (torch.float16, torch.bfloat16)

CHUNKS_HEADING = "weight in a chunk (name, chunk, first element, elements of the chunk)"
"""The heading under which :meth:`BufferLayout.describe` lists them."""

Spans = Sequence[Sequence[tuple[int, int]]]
"""Parts ``[start, end)`` of a tensor, by rank."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """A trainable parameter as the layout sees it.

    ``stride`` (elements) is the parameter's own if its memory is dense, so that channels_last stays channels_last;
    a parameter that overlaps itself or has holes gets contiguous strides. ``chunk``: its place among weights that stay
    together; see recurrent_weights' [Note: weights in one chunk]. ``reserved_numel``: the elements that are
    set aside for it; see local_parts' [Note: one layout on all tensor ranks]. ``domain``: of the ranks
    that hold the same elements; None if all data-parallel ranks do.
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
    """Elements ``[start, end)`` of buffer ``buffer``, reduced by one collective; ``index`` is its place in the launch
    order.

    ``params`` are indices into :attr:`BufferLayout.params`, in the order of their addresses; ``domain`` is of the ranks
    that reduce it.
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
    """A contiguous stretch of memory for all parameters of one dtype and domain whose gradients have one dtype.

    ``sum_dtype`` is that of reduced gradients. With ``has_separate_sums`` a rank's shards of these have memory of their
    own, to which each reduction adds; otherwise the sums replace the gradients in the buffer. Gradients are sent in
    ``grad_wire_dtype``, changes of weights in ``param_wire_dtype`` (None where weights are sent themselves); int8
    stands for blocks (wire's [Note: blocks]). ``sent_..._nbytes(n)`` is the size of n elements on the wire.
    ``keeps_low_bits``: see low_bits' [Note: the low bits of main params].
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    numel: int
    domain: Domain
    sum_dtype: torch.dtype
    has_separate_sums: bool
    grad_wire_dtype: torch.dtype
    param_wire_dtype: torch.dtype | None
    keeps_low_bits: bool = False

    @property
    def staging_dtype(self) -> torch.dtype:
        """The dtype in which a piece is gathered: blocks are written from it when all of the piece is there."""
        return self.grad_dtype if self.grad_wire_dtype == torch.int8 else self.grad_wire_dtype

    def sent_grad_nbytes(self, numel: int) -> int:
        return wire_nbytes(numel, self.grad_wire_dtype)

    def sent_weight_nbytes(self, numel: int) -> int:
        return wire_nbytes(numel, self.param_wire_dtype or self.dtype)

    @property
    def shard_numel(self) -> int:
        """The elements that each owner owns."""
        return self.numel // self.domain.num_shards


@dataclasses.dataclass(frozen=True)
class BufferLayout:
    """The whole plan. It checks itself when it is made; nothing computes an offset after it.

    Args:
        params: every trainable parameter once, in order of registration.
        slots: the place of each parameter, same order.
        buffers: one for each (dtype, grad dtype, domain).
        buckets: in launch order.
        domain: all data-parallel ranks, and the number of equal parts in which they own a bucket.
        piece_numel: with pooled gradients the most elements that are sent at once; None where gradients have buffers
            of their own.
        state_dtype: that in which fp32 numbers of the optimizer's state are kept between steps, where shards have one
            for each element; None for fp32.
        offloads_state: whether that state is in the host's memory between steps.
    """

    params: tuple[ParamSpec, ...]
    slots: tuple[ParamSlot, ...]
    buffers: tuple[Buffer, ...]
    buckets: tuple[Bucket, ...]
    domain: Domain
    piece_numel: int | None = None
    state_dtype: torch.dtype | None = None
    offloads_state: bool = False

    def __post_init__(self) -> None:
        alignment = bucket_alignment(self.dp_size, self.num_shards)
        ends = [0] * len(self.buffers)
        # By address, not by launch order: only then does a gap, which nobody would reduce or own, show.
        for bucket in sorted(self.buckets, key=lambda bucket: (bucket.buffer, bucket.start)):
            assert bucket.start == ends[bucket.buffer], "buckets cover a buffer without gap or overlap"
            assert bucket.numel % alignment == 0, "a bucket divides into equal shards"
            ends[bucket.buffer] = bucket.end
            position = bucket.start
            for index in bucket.params:
                slot, chunk = self.slots[index], self.params[index].chunk
                assert position <= slot.start <= slot.end <= bucket.end, "parameters lie in their bucket, apart"
                first = slot.start - (0 if chunk is None else chunk.start)
                assert first % PARAM_ALIGNMENT_NUMEL == 0, "parameters, or the chunks that they lie in, are aligned"
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
    def is_pooled(self) -> bool:
        """Whether gradients have no buffers of their own, and are reduced in every backward."""
        return self.piece_numel is not None

    def sends_weight_changes(self, param: int) -> bool:
        """Whether weights are sent as rounded changes; see param_shard's [Note: remainders of sent changes]."""
        return self.buffers[self.slots[param].buffer].param_wire_dtype is not None

    def has_separate_main(self, param: int) -> bool:
        """Whether the optimizer steps other memory than the weights."""
        return self.params[param].has_main_param or self.sends_weight_changes(param)

    @property
    def steps_in_slices(self) -> bool:
        """Whether what optimizers step, or the state of it, is made for the step; see state_storage's note."""
        keeps_bits = any(buffer.keeps_low_bits for buffer in self.buffers)
        return self.state_dtype is not None or self.offloads_state or keeps_bits

    @property
    def main_dtype(self) -> torch.dtype:
        """The finest dtype that an optimizer steps: 16-bit parameters have fp32 main params."""
        return torch.float64 if any(spec.dtype == torch.float64 for spec in self.params) else torch.float32

    def pieces(self, bucket: Bucket) -> list[tuple[int, int]]:
        """The parts ``[start, end)`` of every shard of the bucket that one collective carries: as few, and as equal, as
        it takes for the parts of all shards to have at most ``piece_numel`` elements."""
        shard_numel = bucket.shard_numel
        if self.piece_numel is None or bucket.numel == 0:
            return [(0, shard_numel)]
        # Equal pieces rather than full ones and a rest: the last piece is exposed, and a small rest still pays the
        # latency. Equal but for the alignment, without which the sums of all pieces but the first would be off it.
        num_pieces = -(-bucket.numel // self.piece_numel)
        numel = round_up(-(-shard_numel // num_pieces), SHARD_ALIGNMENT_NUMEL)
        return [(start, min(start + numel, shard_numel)) for start in range(0, shard_numel, numel)]

    @property
    def staging_nbytes(self) -> list[int]:
        """The bytes of each staging buffer: of the largest piece, in as many as there are pieces for."""
        nbytes = [numel * buffer.staging_dtype.itemsize for buffer, numel in self._piece_numels()]
        return _largest_for_each_of(nbytes, NUM_STAGING_BUFFERS) if self.is_pooled else []

    @property
    def received_nbytes(self) -> list[int]:
        """The bytes of the memory for what ranks exchange, to add it up themselves in a wider dtype; see
        collectives.part_exchange's [Note: memory for what comes]."""
        nbytes = [buffer.sent_grad_nbytes(numel) for buffer, numel in self._piece_numels() if buffer.has_separate_sums]
        return _largest_for_each_of(nbytes, NUM_RECEIVE_BUFFERS)

    def _piece_numels(self) -> Iterator[tuple[Buffer, int]]:
        for bucket in self.buckets:
            for start, end in self.pieces(bucket):
                yield self.buffers[bucket.buffer], (end - start) * bucket.domain.num_shards

    def shard_range(self, bucket: Bucket, dp_rank: int) -> tuple[int, int]:
        """Elements ``[start, end)`` of the bucket's buffer that ``dp_rank`` owns."""
        start = bucket.start + bucket.domain.shard_of(dp_rank) * bucket.shard_numel
        return start, start + bucket.shard_numel

    def owned_range(self, param: int, dp_rank: int) -> tuple[int, int] | None:
        """The part ``[start, end)`` of parameter ``param``'s slot (buffer offsets) that ``dp_rank`` owns; None if
        none of it."""
        slot = self.slots[param]
        bucket = self.buckets[slot.bucket]
        shard_start, shard_end = self.shard_range(bucket, dp_rank)
        if slot.start == slot.end:  # nothing to own, but its counters are somebody's
            return (slot.start, slot.end) if bucket.domain.shard_of(dp_rank) == 0 else None
        # A parameter may lie across the border of two shards, or of many, and then has as many owners.
        start, end = max(slot.start, shard_start), min(slot.end, shard_end)
        return (start, end) if start < end else None

    def holders(self, param: int) -> Iterator[tuple[int, int, int]]:
        """The ranks of an instance that own a part of parameter ``param``'s slot, by address: (rank, start, end), in
        buffer offsets. None of them for a parameter without elements."""
        slot = self.slots[param]
        bucket = self.buckets[slot.bucket]
        start = slot.start
        while start < slot.end:
            rank = (start - bucket.start) // bucket.shard_numel
            end = min(slot.end, bucket.start + (rank + 1) * bucket.shard_numel)
            yield rank, start, end
            start = end

    @property
    def param_order(self) -> list[int]:
        """All parameters, bucket after bucket in launch order, and in each by address."""
        return [index for bucket in self.buckets for index in bucket.params]

    def extended_by(self, other: BufferLayout) -> BufferLayout:
        """This plan with ``other``'s parameters, buffers and buckets after its own, which keep their places.

        So nobody's shard moves when parameters join a model in training; their buckets are launched last.
        """
        # Owners are by rank and place: with other numbers the two halves would have different owners.
        assert self.domain == other.domain
        num_params, num_buffers, num_buckets = len(self.params), len(self.buffers), len(self.buckets)
        return BufferLayout(
            params=self.params + other.params,
            slots=self.slots
            + tuple(
                dataclasses.replace(slot, buffer=slot.buffer + num_buffers, bucket=slot.bucket + num_buckets)
                for slot in other.slots
            ),
            buffers=self.buffers + other.buffers,
            buckets=self.buckets
            + tuple(
                dataclasses.replace(
                    bucket,
                    index=bucket.index + num_buckets,
                    buffer=bucket.buffer + num_buffers,
                    params=tuple(index + num_params for index in bucket.params),
                )
                for bucket in other.buckets
            ),
            domain=self.domain,
            piece_numel=self.piece_numel,
            state_dtype=self.state_dtype,
            offloads_state=self.offloads_state,
        )

    def describe(self) -> dict[str, list[list[object]]]:
        """Lists what ranks must agree on, as JSON-able rows: parameters first, which explain every later difference."""
        specs: list[list[object]] = [
            [s.name, list(s.shape), list(s.stride), str(s.dtype), str(s.grad_dtype)] for s in self.params
        ]
        return {
            "parameter (name, shape, stride, dtype, gradient dtype)": specs,
            CHUNKS_HEADING: [[s.name, *dataclasses.astuple(s.chunk)] for s in self.params if s.chunk is not None],
            "number of ranks and of shards": [[self.dp_size, self.num_shards]],
            "place (name, bucket, first element)": self.describe_places(),
            "bucket (index, buffer, start, end)": [[b.index, b.buffer, b.start, b.end] for b in self.buckets],
        }

    def describe_places(self) -> list[list[object]]:
        """The rows of :meth:`describe` that tensor ranks agree on, too."""
        return [[s.name, slot.bucket, slot.start] for s, slot in zip(self.params, self.slots, strict=True)]


def _largest_for_each_of(nbytes: Sequence[int], number: int) -> list[int]:
    """Gives every buffer the largest size: they are used in turn, and any may get the largest piece."""
    return [max(nbytes)] * min(number, len(nbytes)) if nbytes else []


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def bucket_alignment(dp_size: int, num_shards: int) -> int:
    """The number of elements that divides a bucket's size: its shards are equal then, and each begins aligned."""
    # Nothing more where every rank owns all of every bucket: an all-reduce has no shards.
    shards = num_shards * SHARD_ALIGNMENT_NUMEL if num_shards > 1 else 1
    return math.lcm(dp_size, BUCKET_ALIGNMENT_NUMEL, shards)
