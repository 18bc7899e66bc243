"""The layout is pure arithmetic, so its rules are checked over generated models."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastrategy import DistributedDataParallelConfig
from megastrategy.core import memory_use
from megastrategy.core.collectives.comparison import digest as digest_of
from megastrategy.core.layout import BufferLayout, Domain, ParamSpec, build_layout
from megastrategy.core.layout.arrival_order import better_layout_order, launch_cost
from megastrategy.core.layout.recurrent_weights import ChunkPlace
from megastrategy.core.layout.strides import contiguous_stride, dense_stride

DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)]


def spec(name: str, *shape: int, dtypes: tuple[torch.dtype, torch.dtype] = DTYPES[0]) -> ParamSpec:
    return ParamSpec(name, shape, contiguous_stride(shape), *dtypes)


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=20))
    return [spec(f"p{i}", *shape, dtypes=draw(st.sampled_from(DTYPES))) for i, shape in enumerate(shapes)]


@st.composite
def layouts(draw: st.DrawFn) -> BufferLayout:
    dp_size, sharded = draw(st.integers(1, 9)), draw(st.booleans())
    config = DistributedDataParallelConfig(
        bucket_size=draw(st.one_of(st.none(), st.integers(1, 5000))),
        use_distributed_optimizer=sharded,
        num_distributed_optimizer_instances=draw(
            st.sampled_from([n for n in range(1, dp_size + 1) if dp_size % n == 0 and (sharded or n == 1)])
        ),
    )
    return build_layout(draw(models()), config, dp_size)


@given(layouts())
@settings(deadline=None, max_examples=200)
def test_every_element_has_one_owner(layout: BufferLayout) -> None:
    for first in range(0, layout.dp_size, layout.num_shards):
        for index, param in enumerate(layout.params):
            owners = [0] * param.numel
            for rank in range(first, first + layout.num_shards):
                owned = layout.owned_range(index, rank)
                if owned is not None:
                    start = layout.slots[index].start
                    for element in range(owned[0] - start, owned[1] - start):
                        owners[element] += 1
            assert owners == [1] * param.numel


@given(layouts())
@settings(deadline=None, max_examples=200)
def test_places_are_aligned_apart_and_equal_shards(layout: BufferLayout) -> None:
    taken: dict[int, set[int]] = {}
    for param, slot in zip(layout.params, layout.slots, strict=True):
        assert slot.start % 64 == 0
        assert slot.end - slot.start == param.numel
        elements = set(range(slot.start, slot.end))
        assert not elements & taken.setdefault(slot.buffer, set())
        taken[slot.buffer] |= elements
        buffer = layout.buffers[slot.buffer]
        assert (buffer.dtype, buffer.grad_dtype) == (param.dtype, param.grad_dtype)
    for bucket in layout.buckets:
        assert bucket.end % math.lcm(layout.dp_size, 128) == 0
        shards = [layout.shard_range(bucket, rank) for rank in range(layout.num_shards)]
        assert shards[0][0] == bucket.start
        assert shards[-1][1] == bucket.end
        assert len({end - start for start, end in shards}) == 1


@given(
    models(),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 30)), min_size=1, max_size=5),
    st.integers(1, 500),
    st.integers(1, 9),
    st.data(),
)
@settings(deadline=None, max_examples=100)
def test_chunk_is_in_one_bucket_in_every_order(
    others: list[ParamSpec], parts: list[tuple[int, int]], bucket_size: int, dp_size: int, data: st.DataObject
) -> None:
    """Each part is a parameter and the gap behind it."""
    total, specs = sum(numel + free for numel, free in parts), list(others)
    for number, (numel, _) in enumerate(parts):
        start = sum(sum(part) for part in parts[:number])
        specs.append(dataclasses.replace(spec(f"chunk{number}", numel), chunk=ChunkPlace("rnn", start, total)))
    config = DistributedDataParallelConfig(bucket_size=bucket_size)
    layout = build_layout(specs, config, dp_size, data.draw(st.permutations(range(len(specs)))))
    firsts = {slot.start - s.chunk.start for s, slot in zip(specs, layout.slots, strict=True) if s.chunk is not None}
    [bucket] = {slot.bucket for s, slot in zip(specs, layout.slots, strict=True) if s.chunk is not None}
    assert len(firsts) == 1
    first = firsts.pop()
    assert first % 64 == 0
    place = layout.buckets[bucket]
    assert place.start <= first <= first + total <= place.end
    for index, slot in enumerate(layout.slots):
        inside = slot.buffer == place.buffer and slot.start < first + total and first < slot.end
        assert specs[index].chunk is not None or not inside, "no other parameter is in its gaps"
    plain = build_layout([dataclasses.replace(s, chunk=None) for s in specs], config, dp_size)
    assert digest_of(plain.describe()) != digest_of(layout.describe())


@given(layouts())
@settings(deadline=None, max_examples=100)
def test_buckets_go_in_reverse_order_of_registration(layout: BufferLayout) -> None:
    """Addresses fall as registration goes on, and buckets are launched in the order in which they complete."""
    for number in range(len(layout.buffers)):
        members = [i for i, slot in enumerate(layout.slots) if slot.buffer == number and layout.params[i].numel]
        starts = [layout.slots[i].start for i in members]
        assert starts == sorted(starts, reverse=True)
    complete_at = [min(bucket.params) for bucket in layout.buckets]
    assert complete_at == sorted(complete_at, reverse=True)


@given(
    st.integers(1, 1024),
    st.lists(st.integers(1, 300_000), min_size=1, max_size=6),
    st.sampled_from([None, 1, 40_000]),
    st.sampled_from(["contiguous", "pooled"]),
    st.data(),
)
@settings(deadline=None, max_examples=300)
def test_shards_and_pieces_start_on_128_bytes(
    dp_size: int, numels: list[int], bucket_size: int | None, grad_buffer: str, data: st.DataObject
) -> None:
    """In 16 bits, for every number of ranks and of instances, and at the price of at most 64 elements a shard."""
    instances = data.draw(st.sampled_from([n for n in range(1, dp_size + 1) if dp_size % n == 0]))
    config = DistributedDataParallelConfig(
        bucket_size=bucket_size,
        num_distributed_optimizer_instances=instances,
        grad_buffer="contiguous" if instances == dp_size else grad_buffer,
    )
    layout = build_layout([spec(f"p{i}", numel) for i, numel in enumerate(numels)], config, dp_size)
    for bucket in layout.buckets:
        filled = max(layout.slots[index].end for index in bucket.params)
        assert bucket.end - filled < math.lcm(128, 64 * dp_size)
        for rank in {0, 1, layout.num_shards // 2, layout.num_shards - 1}:
            start, end = layout.shard_range(bucket, rank % layout.num_shards)
            assert start * 2 % 128 == end * 2 % 128 == 0
            pieces = layout.pieces(bucket)
            assert [first for first, _ in pieces] == [0, *(last for _, last in pieces[:-1])]
            assert pieces[-1][1] == end - start
            assert all((start + first) * 2 % 128 == 0 for first, _ in pieces)
            if layout.piece_numel is not None:
                assert all((last - first) * layout.num_shards <= layout.piece_numel for first, last in pieces)


def test_bucket_closes_at_its_size() -> None:
    specs = [spec("a", 100), spec("b", 100), spec("c", 100), spec("d", 1)]
    layout = build_layout(specs, DistributedDataParallelConfig(bucket_size=150), 2)
    # reverse order: d at 0, c at 64, which reaches 164 and closes the bucket at 256; b at 256, a at 384 reaches 228
    assert [bucket.params for bucket in layout.buckets] == [(3, 2), (1, 0)]
    assert [(bucket.start, bucket.end) for bucket in layout.buckets] == [(0, 256), (256, 512)]
    assert [slot.start for slot in layout.slots] == [384, 256, 64, 0]


def test_buckets_of_the_default_size_begin_small() -> None:
    """A quarter of a million elements a parameter, and eighths of the model of 64: 8 of them to a bucket."""
    specs = [spec(f"layer {number}", 2**18) for number in range(64)]
    default = build_layout(specs, DistributedDataParallelConfig(), 2)
    assert [len(bucket.params) for bucket in default.buckets] == [1, 2, 4, 8, 8, 8, 8, 8, 8, 8, 1]
    given = build_layout(specs, DistributedDataParallelConfig(bucket_size=2**21), 2)
    assert [len(bucket.params) for bucket in given.buckets] == [8] * 8, "as the user says"


def test_dense_strides_are_kept_and_others_replaced() -> None:
    assert dense_stride((2, 3, 4, 5), (60, 1, 15, 3)) == (60, 1, 15, 3)  # channels_last
    assert dense_stride((3, 4), (1, 3)) == (1, 3)  # transposed
    assert dense_stride((3, 4), (8, 1)) == (4, 1)  # every second row of something
    assert dense_stride((3, 4), (0, 1)) == (4, 1)  # expanded
    assert dense_stride((), ()) == ()
    assert dense_stride((1, 5), (77, 1)) == (77, 1)  # the stride of a dimension of one says nothing


def test_instances_not_dividing_ranks_are_refused() -> None:
    two = DistributedDataParallelConfig(num_distributed_optimizer_instances=2)
    with pytest.raises(ValueError, match=r"instances=2 does not divide the 3 data-parallel rank.*Pass one of 1, 3"):
        build_layout([spec("a", 1)], two, 3)
    in_sixteen_bits = DistributedDataParallelConfig(
        num_distributed_optimizer_instances=2, grad_reduce_in_fp32=False, reduce_scatter_with_fp32_accumulation=True
    )
    with pytest.raises(ValueError, match=r"instances=2 on 2 ranks contradicts reduce_scatter_with_fp32_acc.*fewer"):
        build_layout([spec("a", 1)], in_sixteen_bits, 2)
    pooled = DistributedDataParallelConfig(num_distributed_optimizer_instances=2, grad_buffer="pooled")
    with pytest.raises(ValueError, match=r"instances=2 on 2 ranks contradicts grad_buffer='pooled'.*fewer"):
        build_layout([spec("a", 1)], pooled, 2)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="'a'"):
        build_layout([spec("a", 1), spec("a", 2)], DistributedDataParallelConfig(), 2)
    with pytest.raises(ValueError, match="dp_size=0"):
        build_layout([spec("a", 1)], DistributedDataParallelConfig(), 0)


@given(st.lists(models(), min_size=2, max_size=3), st.integers(1, 5000), st.integers(1, 9), st.booleans())
@settings(deadline=None, max_examples=100)
def test_extended_layout_keeps_places_and_owners(
    groups: list[list[ParamSpec]], bucket_size: int, dp_size: int, sharded: bool
) -> None:
    """The layout checks coverage and overlap itself; here, that joining parameters change no other place."""
    config = DistributedDataParallelConfig(bucket_size=bucket_size, use_distributed_optimizer=sharded)
    layout = build_layout(groups[0], config, dp_size)
    for joining in groups[1:]:
        added = build_layout(joining, config, dp_size)
        extended = layout.extended_by(added)
        assert extended.params == layout.params + added.params
        assert extended.slots[: len(layout.slots)] == layout.slots
        assert extended.buckets[: len(layout.buckets)] == layout.buckets
        assert extended.buffers == layout.buffers + added.buffers
        for rank in range(dp_size):
            owned = [extended.owned_range(index, rank) for index in range(len(extended.params))]
            assert owned == [
                part.owned_range(index, rank) for part in (layout, added) for index in range(len(part.params))
            ]
        layout = extended


# When another order of buckets is worth a move: arithmetic, checked by hand.

EACH_ITS_BUCKET = DistributedDataParallelConfig(bucket_size=1)


def layout_of(
    numels: list[int],
    config: DistributedDataParallelConfig = EACH_ITS_BUCKET,
    order: list[int] | None = None,
    dtypes: list[torch.dtype] | None = None,
) -> BufferLayout:
    """A layout of 1-D parameters "0", "1", ..., for two ranks."""
    kinds = dtypes or [torch.float32] * len(numels)
    specs = [ParamSpec(str(i), (n,), (1,), kinds[i], torch.float32) for i, n in enumerate(numels)]
    return build_layout(specs, config, 2, order)


def proposal(numels: list[int], arrived: list[int], needed: list[bool] | None = None, **of: int) -> list[int] | None:
    config = DistributedDataParallelConfig(bucket_size=of.get("bucket_size", 1))
    return better_layout_order(layout_of(numels, config), config, arrived, needed or [True] * len(numels))


def test_params_are_laid_out_in_given_order() -> None:
    layout = layout_of([128, 256, 640, 128], DistributedDataParallelConfig(bucket_size=300), order=[1, 3, 0, 2])
    assert [bucket.params for bucket in layout.buckets] == [(1, 3), (0, 2)]
    assert [(slot.bucket, slot.start) for slot in layout.slots] == [(1, 384), (0, 0), (1, 512), (0, 256)]


def test_first_complete_bucket_goes_first() -> None:
    """Whatever was registered first: the bf16 bucket of 0 and 2 waits for 0, which comes last."""
    kinds = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    config = DistributedDataParallelConfig(bucket_size=150)
    assert [b.params for b in layout_of([128] * 4, config, [2, 1, 3, 0], kinds).buckets] == [(1, 3), (2, 0)]
    assert [b.params for b in layout_of([128] * 4, config, [2, 0, 1, 3], kinds).buckets] == [(2, 0), (1, 3)]


def test_launch_cost_counts_waiting_elements() -> None:
    """Buckets of 128, 256 and 640 elements. In the order of arrival each goes with its own gradient; in the other, all
    wait for the one that comes last."""
    layout = layout_of([640, 256, 128])
    assert [bucket.numel for bucket in layout.buckets] == [128, 256, 640]
    assert launch_cost(layout, [1024, 384, 128]) == 128 * 128 + 256 * 384 + 640 * 1024
    assert launch_cost(layout, [640, 896, 1024]) == (128 + 256 + 640) * 1024


def test_late_param_goes_last_in_the_order() -> None:
    """When its bucket may go is known at the end of backward only."""
    assert proposal([1280] * 4, [3, 2, 3, 1, 0]) == [2, 1, 0, 3]


def test_order_gaining_under_a_tenth_is_not_used() -> None:
    """Two neighbours of eight, swapped: the cost is 37 where it could be 36 (in squares of 1280 elements)."""
    assert proposal([1280] * 8, [7, 6, 5, 3, 4, 2, 1, 0]) is None


# Layouts in which experts are held by a part of the data-parallel ranks: owners, and bytes.


DP, DENSE, EXPERTS, NUM_EXPERTS = 8, 64 * 1024, 8 * 64 * 1024, 8


def layout_with_experts(ep: int, **options: object) -> BufferLayout:
    """A dense parameter, and a stack of experts, ``NUM_EXPERTS / ep`` on each rank; both divide evenly."""
    config = DistributedDataParallelConfig(bucket_size=10**9, **options)  # type: ignore[arg-type] # fields by name
    every = build_layout([], config, DP).domain
    groups = tuple(tuple(range(place, DP, ep)) for place in range(ep))
    experts = Domain(groups, every.num_shards // ep)
    dtypes = {"dtype": torch.bfloat16, "grad_dtype": torch.float32}
    specs = [
        ParamSpec(name="dense", shape=(DENSE,), stride=(1,), **dtypes),
        ParamSpec(name="experts", shape=(EXPERTS // ep,), stride=(1,), domain=experts, **dtypes),
    ]
    return build_layout(specs, config, DP)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_expert_bytes_fall_with_ranks(ep: int) -> None:
    """bf16 weights, fp32 gradients, Adam: the formulas of docs/experts.md, to the byte."""
    layout, edp = layout_with_experts(ep), DP // ep
    for dp_rank in range(DP):
        use = memory_use(layout, dp_rank, 2)
        assert use.param_bytes + use.grad_bytes == 6 * (DENSE + EXPERTS // ep)
        assert use.state_bytes == 12 * (DENSE + EXPERTS) // DP
    of_dense = (4 + 2) * DENSE * (DP - 1) // DP
    sent = sum(
        buffer.shard_numel * (buffer.domain.num_shards - 1) * (buffer.grad_wire_dtype.itemsize + buffer.dtype.itemsize)
        for buffer in layout.buffers
    )
    assert sent - of_dense == (4 + 2) * (EXPERTS // ep) * (edp - 1) // edp


@pytest.mark.parametrize(("ep", "instances"), [(1, 1), (4, 1), (2, 2)])
def test_every_expert_element_has_one_owner(ep: int, instances: int) -> None:
    layout = layout_with_experts(ep, num_distributed_optimizer_instances=instances)
    slot = layout.slots[1]
    for part in range(ep):
        group = range(part, DP, ep)
        owned = sorted(span for rank in group if (span := layout.owned_range(1, rank)) is not None)
        assert len(owned) == len(group)
        assert len(set(owned)) == len(group) // instances
        distinct = sorted(set(owned))
        assert (distinct[0][0], distinct[-1][1]) == (slot.start, slot.end)
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(distinct))
