"""One order an epoch, cut anywhere and gone on with by other ranks: every sample once."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from megastrategy.data import ResumableSampler, batch_size_of, sampler_of


class Numbers(Dataset[int]):
    """Sample ``i`` is ``i``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def samplers(size: int, num_ranks: int, **options: Any) -> list[ResumableSampler]:
    """One a rank."""
    return [ResumableSampler(Numbers(size), num_replicas=num_ranks, rank=rank, **options) for rank in range(num_ranks)]


def loader(sampler: ResumableSampler, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(sampler.dataset, batch_size=batch_size, sampler=sampler, **options)


def steps(ranks: Sequence[ResumableSampler], batch_size: int, **options: Any) -> Iterator[list[int]]:
    """The samples that all ranks together train in each step."""
    passes = [sampler.batches(loader(sampler, batch_size, **options)) for sampler in ranks]
    for batches in zip(*passes, strict=True):  # strict: ranks have equally many batches
        yield [index for batch in batches for index in batch.tolist()]


def at(sampler: ResumableSampler, epoch: int, consumed: int) -> dict[str, Any]:
    return sampler.state_dict() | {"epoch": epoch, "consumed": consumed}


def permutation(size: int, epoch: int, seed: int = 0) -> list[int]:
    """Torch's own sampler of one rank."""
    known = DistributedSampler(Numbers(size), num_replicas=1, rank=0, seed=seed)
    known.set_epoch(epoch)
    return list(known)


RUNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 6)), max_size=4)
"""Runs before the last: ranks, samples in a rank's batch, steps after which it is cut."""


@settings(deadline=None)
@given(
    size=st.integers(1, 60), runs=RUNS, last=st.tuples(st.integers(1, 4), st.integers(1, 5)), drop_last=st.booleans()
)
def test_runs_that_are_cut_train_one_permutation(
    size: int, runs: list[tuple[int, int, int]], last: tuple[int, int], drop_last: bool
) -> None:
    """Exactly, except for what does not divide by the ranks at the very end: torch's sampler repeats or leaves it out,
    too."""
    seen: list[int] = []
    state: dict[str, Any] = at(ResumableSampler(Numbers(size), seed=5), 3, 0)
    for num_ranks, batch_size, num_steps in runs:
        ranks = samplers(size, num_ranks, seed=5, drop_last=drop_last)
        for sampler in ranks:
            sampler.load_state_dict(state)
        # a run that is cut after the epoch's last step belongs to another test
        room = (size - state["consumed"]) // (num_ranks * batch_size)
        for _, samples in zip(range(min(num_steps, room)), steps(ranks, batch_size), strict=False):
            seen += samples
            state = ranks[0].state_dict()
            assert all(sampler.state_dict() == state for sampler in ranks)
    order, (num_ranks, batch_size) = permutation(size, 3, seed=5), last
    assert Counter(seen) == Counter(order[: len(seen)])
    assert state["consumed"] == len(seen)
    ranks = samplers(size, num_ranks, seed=5, drop_last=drop_last)
    for sampler in ranks:
        sampler.load_state_dict(state)
    left = size - len(seen)
    seen += [sample for samples in steps(ranks, batch_size) for sample in samples]
    expected = Counter(order)
    if drop_last:
        assert not Counter(seen) - expected
        assert len(seen) == size - left % num_ranks
    else:
        assert Counter(seen) == expected + Counter((order * 4)[: -left % num_ranks])
    assert all((sampler.epoch, sampler.consumed) == (4, 0) for sampler in ranks)


@pytest.mark.parametrize(("num_ranks", "shuffle", "drop_last"), [(1, True, True), (3, True, False), (2, False, True)])
def test_uncut_it_is_torchs_sampler(num_ranks: int, shuffle: bool, drop_last: bool) -> None:
    for sampler in samplers(14, num_ranks, shuffle=shuffle, drop_last=drop_last, seed=9):
        known = DistributedSampler(
            sampler.dataset, num_ranks, sampler.rank, shuffle=shuffle, drop_last=drop_last, seed=9
        )
        for epoch in (0, 1, 5):
            sampler.set_epoch(epoch)
            known.set_epoch(epoch)
            assert list(sampler) == list(known)
            assert (len(sampler), sampler.num_samples, sampler.total_size) == (
                len(known),
                known.num_samples,
                known.total_size,
            )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_workers_read_ahead_is_not_consumed(num_workers: int) -> None:
    [sampler] = samplers(40, 1)
    batches = sampler.batches(loader(sampler, 4, num_workers=num_workers, prefetch_factor=3 if num_workers else None))
    assert [sampler.consumed, *(sampler.consumed for _ in zip(range(3), batches, strict=False))] == [0, 4, 8, 12]
    batches.close()  # type: ignore[attr-defined]
    [other] = samplers(40, 1)
    other.load_state_dict(sampler.state_dict())
    assert next(iter(loader(other, 4))).tolist() == permutation(40, 0)[12:16]


def test_pass_that_is_left_is_continued_by_the_next() -> None:
    [sampler] = samplers(6, 1)
    for expected in (0, 1):
        assert [index for samples in steps([sampler], 2) for index in samples] == permutation(6, expected)
    next(steps([sampler], 2))
    assert sampler.state_dict() == at(sampler, 2, 2)
    assert [index for samples in steps([sampler], 2) for index in samples] == permutation(6, 2)[2:]
    assert sampler.state_dict() == at(sampler, 3, 0)


def test_restored_epoch_keeps_its_place_when_set() -> None:
    [sampler] = samplers(6, 1)
    sampler.load_state_dict(at(sampler, 2, 4))
    sampler.set_epoch(2)
    assert list(sampler) == permutation(6, 2)[4:]
    sampler.set_epoch(3)
    assert list(sampler) == permutation(6, 3)


def test_epoch_may_be_set_after_the_iterator() -> None:
    """Lightning does, in the first epoch of a fit."""
    [sampler] = samplers(6, 1)
    batches = iter(loader(sampler, 3))
    sampler.set_epoch(4)
    assert next(batches).tolist() == permutation(6, 4)[:3]


@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_samplers(drop_last: bool) -> None:
    [sampler] = samplers(7, 1)
    data = DataLoader(sampler.dataset, batch_sampler=BatchSampler(sampler, 2, drop_last))
    assert sampler_of(data) is sampler
    assert batch_size_of(data) == 2
    places = [sampler.consumed for _ in sampler.batches(data)]
    assert places == [2, 4, 6] + [7] * (not drop_last)


def test_strategy_divides_unless_the_user_did() -> None:
    sampler = ResumableSampler(Numbers(8))
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    sampler.divide(4, 3)
    assert (sampler.num_replicas, sampler.rank) == (4, 3)
    [first, _] = samplers(8, 2)
    first.divide(4, 3)
    assert (first.num_replicas, first.rank) == (2, 0)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


class OfWords(BatchSampler):
    """Batches of several sizes."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self.sampler = sampler


def test_errors() -> None:
    with pytest.raises(ValueError, match="Endless has no length"):
        ResumableSampler(Endless())
    with pytest.raises(ValueError, match="rank=None: give both, or neither"):
        ResumableSampler(Numbers(1), num_replicas=2)
    with pytest.raises(ValueError, match="rank=2: expected 0 to 1"):
        ResumableSampler(Numbers(1), num_replicas=2, rank=2)
    [sampler] = samplers(8, 1)
    with pytest.raises(ValueError, match="OfWords has no batch_size"):
        batch_size_of(DataLoader(sampler.dataset, batch_sampler=OfWords(sampler)))
    with pytest.raises(ValueError, match="leave in_order=False out"):
        batch_size_of(loader(sampler, 2, in_order=False))
    for other, name in [
        (ResumableSampler(Numbers(9)), "num_samples=9"),
        (ResumableSampler(Numbers(8), seed=1), "seed=1"),
        (ResumableSampler(Numbers(8), shuffle=False), "shuffle=False"),
    ]:
        with pytest.raises(ValueError, match=f"saved with {name}, and this sampler has"):
            sampler.load_state_dict(other.state_dict())
    assert sampler.state_dict() == at(sampler, 0, 0), "nothing is changed"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize(("num_workers", "num_ranks"), [(0, 1), (2, 3)])
def test_torchdatas_loader_keeps_the_place(num_workers: int, num_ranks: int) -> None:
    """It saves the state of the sampler's iterator with each batch; any number of ranks goes on with rank 0's."""
    options = {"num_workers": num_workers, "batch_size": 3}
    [first, _] = samplers(23, 2)
    data = StatefulDataLoader(first.dataset, sampler=first, **options)
    for _ in zip(range(2), data, strict=False):
        state = data.state_dict()
    seen: list[int] = []
    for sampler in samplers(23, num_ranks):
        rest = StatefulDataLoader(sampler.dataset, sampler=sampler, **options)
        rest.load_state_dict(copy.deepcopy(state))
        seen += [index for batch in rest for index in batch.tolist()]
    order = permutation(23, 0)
    assert Counter(seen) == Counter(order[12:] + order[: -11 % num_ranks])
