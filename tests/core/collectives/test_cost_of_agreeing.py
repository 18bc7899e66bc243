"""The messages by which ranks agree grow with the logarithm of their number, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from benchmarks.agreement import NUM_PARAMS, PLACES, Cost, costs
from megastrategy._faults import deadlocks
from megastrategy._faults.deadlocks import DeadlockFinder, _Note, _Started

NUM_FACTS = 9
"""Numbers of eight bytes in which ranks meet before a batch: six places, three facts."""


@pytest.mark.parametrize(
    "size", [2, 8, pytest.param(32, marks=pytest.mark.long), pytest.param(128, marks=pytest.mark.long)]
)
def test_messages_and_bytes_are_those_of_the_formula(size: int) -> None:
    before, after, wrapped = (costs(size)[name] for name in PLACES)
    for cost, nbytes in ((before, 8 * NUM_FACTS), (after, NUM_PARAMS + 1 + 6), (wrapped, 2 * 32)):
        if size <= 4:  # gloo's ring
            hops = 2 * (size - 1)
            assert cost == Cost(hops, math.ceil(hops * nbytes / size), hops)
        else:  # to the rank at distance 1, 2, 4 and so on, each message after the receiver's word of a byte
            rounds = math.ceil(math.log2(size))
            assert cost == Cost(2 * rounds, rounds * (nbytes + 1), 2 * rounds)


class CountingStore:
    """The notes of ranks that wait, and how often it was asked for anything."""

    def __init__(self) -> None:
        self._store, self.num_requests = HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.num_requests += 1
        return getattr(self._store, name)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CountingStore, pytest.MonkeyPatch]]:
    """In place of the store of torch.distributed, which there is none of here."""
    board = CountingStore()
    monkeypatch.setattr(deadlocks, "_notes_in_store", lambda name: board)
    return board, monkeypatch


def as_rank(rank: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.distributed, "get_rank", lambda: rank)


def note(number: int) -> _Note:
    return _Note("group", f"number {number}", number, {"group": _Started(number, [])})


@pytest.mark.parametrize("num_waiting", [0, 1, 127])
def test_a_rank_reads_all_notes_in_three_requests(num_waiting: int, board: Any) -> None:
    store, patch = board
    waiting = [DeadlockFinder(lambda: "1.0") for _ in range(num_waiting)]
    for time in (1, 2):  # the second in place of the first
        for rank, waits in enumerate(waiting):
            as_rank(rank, patch)
            waits._write_note("1.0", note(time))
    as_rank(127, patch)
    store.num_requests = 0
    notes = DeadlockFinder._notes_of_others("1.0")
    assert notes == {rank: note(2) for rank in range(num_waiting)}
    assert store.num_requests == (3 if num_waiting else 1)
    own = DeadlockFinder(lambda: "1.0")
    own._write_note("1.0", note(5))
    assert 127 not in DeadlockFinder._notes_of_others("1.0")


def test_a_note_that_is_counted_and_not_yet_written_hides_no_other(board: Any) -> None:
    store, patch = board
    as_rank(3, patch)
    DeadlockFinder(lambda: "1.0")._write_note("1.0", note(1))
    store.add("num", 1)
    as_rank(0, patch)
    assert DeadlockFinder._notes_of_others("1.0") == {3: note(1)}
