"""A shard is a range of a tensor's memory: cut into boxes, found by its place, not computed with."""

from __future__ import annotations

import math

import pytest
import torch

from megastrategy.core.module.local_parts import CutParam, cut_of
from megastrategy.core.states.flat_shard import FlatShard, boxes


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (1, 7), (4, 1), (2, 3, 4), (3, 1, 2, 5)])
def test_range_is_cut_into_boxes_in_order(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    whole = torch.arange(numel).view(shape)
    for start in range(numel + 1):
        for end in range(start, numel + 1):
            parts = list(boxes(shape, start, end))
            assert len(parts) <= max(1, 2 * len(shape) - 1)
            elements: list[int] = []
            for offsets, sizes in parts:
                part = whole
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    part = part.narrow(dim, offset, size)
                elements += part.reshape(-1).tolist()
            assert elements == list(range(start, end))


def test_shard_of_channels_last_tensor_is_found() -> None:
    whole = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    in_memory = whole.as_strided((whole.numel(),), (1,))
    seen = torch.full_like(whole, -1)
    for start, end in [(0, 37), (37, 38), (38, 120)]:
        shard = FlatShard(in_memory[start:end], start, tuple(whole.shape), whole.stride())
        for item in shard.__create_write_items__("weight", shard):
            part = shard.__get_tensor_shard__(item.index)
            offsets, sizes = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
            assert 0 <= part.data_ptr() - whole.data_ptr() < whole.nbytes, "not a copy"
            assert part.untyped_storage().nbytes() == part.nbytes, "otherwise torch's writer would copy it"
            slices = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            assert seen[slices].eq(-1).all()
            seen[slices] = part
    assert torch.equal(seen, whole)


@pytest.mark.parametrize(("dim", "num_parts"), [(0, 1), (1, 2), (2, 3), (0, 5)])
def test_shards_of_parts_fill_the_whole_once(dim: int, num_parts: int) -> None:
    """Uneven parts, and empty ones; each in a memory order of its own, as a transposed layer has it."""
    whole = torch.arange(4 * 7 * 3.0).view(4, 7, 3)
    seen = torch.full_like(whole, -1)
    for rank in range(num_parts):
        cut = CutParam(tuple(whole.shape), dim, cut_of(whole.shape[dim], rank, num_parts))
        part = cut.cut(whole).transpose(0, 2).contiguous().transpose(0, 2)
        in_memory = part.as_strided((part.numel(),), (1,))
        for start, end in [(0, part.numel() // 3), (part.numel() // 3, part.numel())]:
            shard = FlatShard(in_memory[start:end], start, cut.part_shape, part.stride(), cut)
            assert shard.shape == whole.shape
            for item in shard.__create_write_items__("weight", shard):
                chunk = item.tensor_data.chunk
                slices = tuple(
                    slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)
                )
                assert seen[slices].eq(-1).all()
                seen[slices] = shard.__get_tensor_shard__(item.index)
        assert torch.equal(FlatShard.of_part(part, cut).as_part(), part)
    assert torch.equal(seen, whole)


@pytest.mark.parametrize("sizes", [(7, 1, 0, 5, 29), (1, 1, 40), (42,)])
def test_pieces_are_one_range(sizes: tuple[int, ...]) -> None:
    """As saved, as copied, and as the target of a copy."""
    whole = torch.arange(8 * 9.0).view(8, 9)
    pieces = whole.view(-1)[11 : 11 + 42].split(sizes)
    shard = FlatShard(pieces, 11, (8, 9), (9, 1))
    seen = torch.full_like(whole, -1)
    for item in shard.__create_write_items__("weight", shard):
        chunk = item.tensor_data.chunk
        slices = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        part = shard.__get_tensor_shard__(item.index)
        assert part.untyped_storage().nbytes() == part.nbytes
        seen[slices] = part
    assert torch.equal(seen.view(-1)[11:53], torch.cat(pieces))
    assert seen.eq(-1).sum() == 72 - 42
    copied = torch.zeros_like(shard)
    assert not copied.local.any()
    copied.copy_(FlatShard(torch.cat(pieces), 11, (8, 9), (9, 1)))
    assert torch.equal(copied.local, torch.cat(pieces))
    assert [piece.numel() for piece in copied.detach().pieces] == list(sizes)


def test_computing_with_a_shard_is_refused_by_name() -> None:
    shard = FlatShard(torch.ones(3), 2, (2, 4), (4, 1))
    with pytest.raises(NotImplementedError, match=r"aten.add.*FlatShard\(\[2, 5\) of \(2, 4\).*state_dict\(\)"):
        shard + 1
    copy = shard.clone()
    copy.local.add_(1)
    assert shard.local.tolist() == [1, 1, 1]
