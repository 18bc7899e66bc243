"""The agreement of any number of ranks, without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megastrategy.core.data_path.agreement import Agreement


def facts_of_ranks() -> st.SearchStrategy[list[Agreement]]:
    """The facts of one to five ranks, with as many parameters and buckets on each."""
    flags = st.binary(min_size=6, max_size=6).map(lambda drawn: bytes(byte % 2 for byte in drawn))
    rank = st.builds(
        Agreement,
        used=flags,
        late=flags,
        has_failed=st.booleans(),
        has_nonfinite=st.booleans(),
        counting=st.tuples(st.booleans(), st.booleans()),
        microbatch=st.integers(0, 600),
    )
    return st.lists(rank, min_size=1, max_size=5)


def agreed_by(ranks: list[Agreement]) -> Agreement:
    """The agreement of the first rank: the others' bytes are noted before their maximum is given."""
    sent: list[torch.Tensor] = []

    def note(facts: torch.Tensor) -> None:
        sent.append(facts.clone())

    def set_maximum(facts: torch.Tensor) -> None:
        facts.copy_(torch.stack([facts, *sent]).amax(0))

    def collectives(exchange: Any) -> Any:
        return SimpleNamespace(size=len(ranks), max_of_facts=exchange)

    for rank in ranks[1:]:
        rank.over_ranks(collectives(note), None)
    return ranks[0].over_ranks(collectives(set_maximum), None)


@given(facts_of_ranks())
def test_agreement_joins_flags_and_compares_numbers(ranks: list[Agreement]) -> None:
    agreed = agreed_by(ranks)
    assert list(agreed.used) == [max(flags) for flags in zip(*(rank.used for rank in ranks), strict=True)]
    assert list(agreed.late) == [max(flags) for flags in zip(*(rank.late for rank in ranks), strict=True)]
    assert agreed.has_failed == any(rank.has_failed for rank in ranks)
    assert agreed.has_nonfinite == any(rank.has_nonfinite for rank in ranks)
    assert agreed.counting == tuple(any(flags) for flags in zip(*(rank.counting for rank in ranks), strict=True))
    last_bits = {(rank.microbatch or 0) % 256 for rank in ranks}
    assert (agreed.microbatch is None) == (len(last_bits) > 1)
    assert agreed.microbatch is None or agreed.microbatch % 256 in last_bits
