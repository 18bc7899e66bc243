"""Parts of a tensor of any size: gathered, and sent to each other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core.collectives import BackendCollectives, Collectives, GlooCollectives
from megastrategy.core.layout.layout import Spans
from tests.support.doubles import RecordingCollectives
from tests.support.ranks import run_ranks

NUMEL = 1000


def cut_at_random(size: int, seed: int, numel: int = NUMEL) -> Spans:
    """Who has which elements: gaps, spans of one element, ranks without any."""
    generator = random.Random(seed)
    ends = sorted(generator.sample(range(numel + 1), 24))
    spans: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    having = generator.sample(range(size), generator.randint(1, size))
    for start, end in zip(ends[:-1:2], ends[1::2], strict=True):
        spans[generator.choice(having)].append((start, end))
    return spans


KINDS: dict[str, Callable[[ProcessGroup], Collectives]] = {
    "rings": GlooCollectives,
    "backend": BackendCollectives,
    "recording": RecordingCollectives,
}

each_kind = pytest.mark.parametrize(
    ("kind", "size", "dtype"),
    [
        ("rings", 1, torch.float32),
        ("rings", 4, torch.float32),
        ("rings", 5, torch.float32),
        ("backend", 2, torch.bfloat16),
        ("recording", 3, torch.complex64),
    ],
)


def element(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Other numbers on each rank, exact in every dtype."""
    return ((torch.arange(numel) + 31 * rank) % 100).to(dtype)


@each_kind
def test_gather_of_spans(kind: str, size: int, dtype: torch.dtype) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        collectives = KINDS[kind](group)
        for seed in range(4):
            spans = cut_at_random(size, seed)
            tensor = element(rank, NUMEL, dtype)
            expected = tensor.clone()
            for other, of_rank in enumerate(spans):
                for start, end in of_rank:
                    expected[start:end] = element(other, NUMEL, dtype)[start:end]
            collectives.gather_spans(tensor, spans).wait()
            assert torch.equal(tensor, expected)
        nothing = element(rank, NUMEL, dtype)
        collectives.gather_spans(nothing, [[] for _ in range(size)]).wait()
        assert torch.equal(nothing, element(rank, NUMEL, dtype))
        collectives.close()

    run_ranks(size, run)


@each_kind
def test_all_to_all(kind: str, size: int, dtype: torch.dtype) -> None:
    """Every rank's part for each rank; many of them are empty."""

    def sizes(source: int, seed: int) -> list[int]:
        generator = random.Random(f"{source} {seed}")
        return [0 if to == source or generator.random() < 0.4 else generator.randint(1, 300) for to in range(size)]

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = KINDS[kind](group)
        for seed in range(4):
            sent = element(rank, sum(sizes(rank, seed)), dtype)
            coming = [sizes(source, seed)[rank] for source in range(size)]
            received = torch.zeros(sum(coming), dtype=dtype)
            collectives.all_to_all(received, sent, coming, sizes(rank, seed)).wait()
            expected = [
                element(source, sum(sizes(source, seed)), dtype).split(sizes(source, seed))[rank]
                for source in range(size)
            ]
            assert torch.equal(received, torch.cat(expected))
        collectives.close()

    run_ranks(size, run)
