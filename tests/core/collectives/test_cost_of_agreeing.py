"""The messages by which ranks agree grow with the logarithm of their number, or not at all."""

from __future__ import annotations

import math

import pytest

from benchmarks.agreement import NUM_PARAMS, PLACES, Cost, costs

NUM_FACTS = 9
"""Numbers of eight bytes in which ranks meet before a batch: six places, three facts."""


@pytest.mark.parametrize(
    "size", [2, 8, pytest.param(32, marks=pytest.mark.nightly), pytest.param(128, marks=pytest.mark.nightly)]
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
