"""The mover of state: random owners before and after, sizes, ranks, dtypes, and ranks that own nothing."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy.core.collectives import GlooCollectives
from megastrategy.core.states import LocalState, Parts, gather_states, mover, redistribute_state
from tests.support.ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64]


def owners(draw: random.Random, numel: int, ranks: list[int]) -> list[tuple[int, int, int]]:
    """Cuts a parameter at random places, and gives each part to one of these ranks."""
    cuts = sorted({0, numel, *(draw.randint(0, numel) for _ in range(draw.randint(0, 3)))})
    return [(draw.choice(ranks), start, end) for start, end in itertools.pairwise(cuts)]


def values(numel: int, index: int, key: str, dtype: torch.dtype) -> torch.Tensor:
    """The whole value of a parameter, which every rank can compute."""
    return ((torch.arange(numel) * 7 + 13 * index + len(key)) % 251).to(dtype)


@pytest.mark.parametrize("seed", range(12))
def test_every_element_arrives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 4)
    monkeypatch.setattr(mover, "ROUND_NUMEL", draw.choice([7, 64, 1000, 2**24]))
    numels = [draw.choice([0, 1, 2, 5, 64, draw.randint(1, 500)]) for _ in range(draw.randint(1, 12))]
    keys = ["sum", "sums"]
    dtypes = {index: {key: draw.choice(DTYPES) for key in keys if draw.random() < 0.8} for index in range(len(numels))}
    has_state = [rank for rank in range(size) if draw.random() < 0.7] or [0]  # others are empty
    receives = [rank for rank in range(size) if draw.random() < 0.7] or [size - 1]
    before = [owners(draw, numel, has_state) for numel in numels]
    after = [owners(draw, numel, receives) for numel in numels]
    if draw.random() < 0.3:  # as a save: all of it on several ranks
        after = [[(rank, 0, numel) for rank in receives] for numel in numels]

    def run(rank: int, group: ProcessGroup) -> None:
        local: LocalState = {}
        for index, of_param in dtypes.items():
            for key, dtype in of_param.items():
                whole = values(numels[index], index, key, dtype)
                parts = Parts((start, whole[start:end].clone()) for owner, start, end in before[index] if owner == rank)
                local.setdefault(index, {})[key] = parts
        sent = redistribute_state(
            local,
            dtypes,
            numels.__getitem__,
            before.__getitem__,
            after.__getitem__,
            GlooCollectives(group),
            torch.device("cpu"),
            onto_host=seed % 2 == 0,
        )
        for index, of_param in dtypes.items():
            for key, dtype in of_param.items():
                whole = values(numels[index], index, key, dtype)
                expected = [(start, end) for owner, start, end in after[index] if owner == rank and start < end]
                assert [(start, start + part.numel()) for start, part in sent[index][key]] == expected
                for start, part in sent[index][key]:
                    assert part.dtype == dtype
                    assert torch.equal(part, whole[start : start + part.numel()])

    run_ranks(size, run)


@pytest.mark.parametrize("seed", range(4))
def test_objects_arrive_whole_on_their_receivers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 3)
    monkeypatch.setattr(mover, "ROUND_NUMEL", 1000)
    receives = [draw.random() < 0.5 for _ in range(size)]
    owner = {index: draw.randrange(size) for index in range(9)}
    states = {index: {"factors": [torch.full((index, 3), 1.5)], "count": index} for index in owner}

    def run(rank: int, group: ProcessGroup) -> None:
        local = {index: values for index, values in states.items() if owner[index] == rank}
        received = dict(gather_states(local, GlooCollectives(group), torch.device("cpu"), receives))
        assert received.keys() == (states.keys() if receives[rank] else set())
        for index, of_param in received.items():
            assert of_param["count"] == index
            assert torch.equal(of_param["factors"][0], states[index]["factors"][0])

    run_ranks(size, run)
