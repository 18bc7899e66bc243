"""A sampler that counts an epoch's samples, so that a run goes on within it on another number of ranks.

[Note: one order, and a place in it]
An epoch is one order of all samples. A step takes the next ``num_replicas * batch_size`` of them, and rank r every
``num_replicas``-th from the r-th on, as torch's DistributedSampler does. So what all ranks have trained is the
beginning of the order, and one number describes it: ``consumed``. The remaining samples are divided among any ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

__all__ = ["ResumableSampler"]


class ResumableSampler(DistributedSampler[Any]):
    """Gives each rank its part of an epoch, from any sample of it on.

    Without a restored state it gives what torch's ``DistributedSampler`` does, in the same order. The class is one of
    these, so that Lightning and Fabric leave it in place. Leave its loader out of Accelerate's ``prepare``, which
    would divide it once more.

    Args:
        dataset: a dataset with a length, whose samples are numbered.
        seed, shuffle: the order of epoch ``e`` is the permutation of seed ``seed + e``, or ascending.
        drop_last: leaves out the samples at an epoch's end that do not divide by the ranks, ``num_replicas - 1`` at
            most. Otherwise some of the order's first samples come again there, so that ranks have equally many.
        num_replicas, rank: the data-parallel ranks. By default those of the strategy, or of torch's default process
            group, or one.

    Attributes:
        epoch: the number of the epoch; :meth:`set_epoch` sets it.
        consumed: the number of samples of this epoch that all ranks together have consumed.
    """

    # The base's __init__ is not called: it wants a process group before a strategy has made one.
    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise ValueError(
                f"a ResumableSampler numbers the samples of a dataset, and {type(dataset).__name__} has no length"
            )
        if (num_replicas is None) != (rank is None):
            raise ValueError(f"num_replicas={num_replicas} and rank={rank}: give both, or neither")
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise ValueError(f"rank={rank}: expected 0 to {num_replicas - 1}, since num_replicas={num_replicas}")
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self.consumed = 0
        self._given = None if num_replicas is None or rank is None else (num_replicas, rank)
        self._ranks: tuple[int, int] | None = self._given
        self._is_counting = False

    def divide(self, num_replicas: int, rank: int) -> None:
        """Divides samples among these ranks, unless the constructor was given others."""
        self._ranks = self._given or (num_replicas, rank)

    def _num_and_rank(self) -> tuple[int, int]:
        if self._ranks is not None:
            return self._ranks
        # A loader is often made before the process group.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size(), torch.distributed.get_rank()
        return 1, 0

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return self._num_and_rank()[0]

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._num_and_rank()[1]

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples that this rank has in a full epoch."""
        size = len(self.dataset)  # type: ignore[arg-type]
        num_replicas = self.num_replicas
        return size // num_replicas if self.drop_last else math.ceil(size / num_replicas)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        return self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return _Indices(self)

    def remaining(self) -> list[int]:
        """Lists this rank's samples of the epoch that are not consumed."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(self.dataset), generator=generator, device="cpu")  # type: ignore[arg-type]
        else:
            order = torch.arange(len(self.dataset), device="cpu")  # type: ignore[arg-type]
        remaining = order[self.consumed :]
        missing = -len(remaining) % self.num_replicas
        if self.drop_last:
            remaining = remaining[: len(remaining) // self.num_replicas * self.num_replicas]
        elif missing:
            # The order's first samples, so that a run that was cut ends as one that was not.
            remaining = torch.cat([remaining, order.repeat(math.ceil(missing / len(order)))[:missing]])
        indices: list[int] = remaining[self.rank :: self.num_replicas].tolist()
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. A restored one keeps its place, and :meth:`batches` counts epochs itself."""
        if self._is_counting:
            return  # Fabric sets the number of passes in this process
        if epoch != self.epoch:
            self.consumed = 0
        self.epoch = epoch

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yields the loader's batches, each counted as consumed when it is handed over; then begins the next epoch.

        Workers read ahead, so the sampler itself cannot know what was trained. A pass that is left early is continued
        by the next one.
        """
        samples_per_batch = batch_size_of(loader) * self.num_replicas
        self._is_counting = True
        try:
            for batch in loader:
                self.consumed = min(self.consumed + samples_per_batch, len(self.dataset))  # type: ignore[arg-type]
                yield batch
        finally:
            self._is_counting = False
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place, the same on every rank: plain numbers, for any checkpoint."""
        order = {"num_samples": len(self.dataset), "seed": self.seed, "shuffle": self.shuffle}  # type: ignore[arg-type]
        return {"epoch": self.epoch, "consumed": self.consumed, **order}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a place that any number of ranks has saved.

        Raises:
            ValueError: if the order is another one: the dataset's length, the seed or ``shuffle`` has changed.
        """
        current = self.state_dict()
        for name in ("num_samples", "seed", "shuffle"):
            if state_dict[name] != current[name]:
                raise ValueError(
                    f"the place in the data was saved with {name}={state_dict[name]}, and this sampler has "
                    f"{name}={current[name]}: samples would be trained twice, or never. Use the same dataset and "
                    "sampler, or leave the sampler's state out to begin the epoch anew"
                )
        self.epoch = state_dict["epoch"]
        self.consumed = state_dict["consumed"]


class _Indices(Iterator[int]):
    """Yields a rank's samples. torchdata's loader saves its state with each batch, and so counts without workers."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler
        self._indices: list[int] | None = None
        self._num_yielded = 0

    def __next__(self) -> int:
        # Not before the first: frameworks set the epoch after they made the loader's iterator.
        if self._indices is None:
            self._start = self._sampler.consumed
            self._indices = self._sampler.remaining()
        if self._num_yielded == len(self._indices):
            raise StopIteration
        self._num_yielded += 1
        return self._indices[self._num_yielded - 1]

    def state_dict(self) -> dict[str, Any]:
        state = self._sampler.state_dict()
        if self._indices is not None:
            consumed = self._start + self._num_yielded * self._sampler.num_replicas
            state["consumed"] = min(consumed, state["num_samples"])
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state_dict)
        self._indices = None
        self._num_yielded = 0


def sampler_of(loader: object) -> ResumableSampler | None:
    """Finds the sampler of a loader, or that of its batch sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, ResumableSampler):
            return sampler
    return None


def batch_size_of(loader: Any) -> int:
    """Returns the number of samples in a rank's batch.

    Raises:
        ValueError: if batches need not be of one size, or in the order in which they were sampled.
    """
    if not getattr(loader, "in_order", True):
        raise ValueError("a ResumableSampler counts batches in their order: leave in_order=False out of the DataLoader")
    # A loader without batches has samples, and a batch sampler its own size.
    size = getattr(loader, "batch_size", None) or getattr(loader.batch_sampler, "batch_size", None)
    if size is None and loader.batch_sampler is not None:
        raise ValueError(
            f"{type(loader.batch_sampler).__name__} has no batch_size: a ResumableSampler counts batches of one size. "
            "Give it this attribute if its batches are, else use another sampler"
        )
    return 1 if size is None else int(size)
