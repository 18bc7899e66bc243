"""The agreement of any number of ranks, and without a process group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from megastrategy.core.sync.agreement import Agreement


@st.composite
def said_by_ranks(draw: st.DrawFn) -> list[Agreement]:
    """The facts of one to five ranks, with as many parameters and buckets on each."""
    num_params, num_buckets = draw(st.integers(0, 6)), draw(st.integers(0, 4))
    rank = st.builds(
        Agreement,
        used=st.lists(st.booleans(), min_size=num_params, max_size=num_params),
        late=st.lists(st.booleans(), min_size=num_buckets, max_size=num_buckets),
        microbatch=st.integers(0, 600),
        has_nonfinite=st.booleans(),
        wants_other_order=st.booleans(),
        counting=st.tuples(st.booleans(), st.booleans()),
    )
    return draw(st.lists(rank, min_size=1, max_size=5))


@given(said_by_ranks())
def test_what_some_rank_says_holds_for_all_and_what_has_to_be_one_is_compared(ranks: list[Agreement]) -> None:
    numbers = [max(of_all) for of_all in zip(*(rank.encode() for rank in ranks), strict=True)]
    assert all(0 <= number <= 255 for number in numbers), "bytes"
    agreed = Agreement.decode(numbers, len(ranks[0].used))
    assert agreed.used == [any(flags) for flags in zip(*(rank.used for rank in ranks), strict=True)]
    assert agreed.late == [any(flags) for flags in zip(*(rank.late for rank in ranks), strict=True)]
    assert agreed.has_nonfinite == any(rank.has_nonfinite for rank in ranks)
    assert agreed.wants_other_order == any(rank.wants_other_order for rank in ranks)
    last_bits = {rank.microbatch % 256 for rank in ranks if rank.microbatch is not None}
    assert agreed.microbatch == (last_bits.pop() if len(last_bits) == 1 else None)
    assert agreed.counting == tuple(any(flags) for flags in zip(*(rank.counting for rank in ranks), strict=True))
