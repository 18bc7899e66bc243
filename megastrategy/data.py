"""Data in one global order, so that a run goes on in mid-epoch, on another number of ranks too.

[Note: one order, and a place in it]
An epoch is one order of all samples. A step takes the next ``num_replicas * batch_size`` of them, and rank r every
``num_replicas``-th from the r-th on, as torch's DistributedSampler does. So what all ranks have trained is the
beginning of the order, and one number says it: ``consumed``. Ranks that come later divide what is left, however many
they are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

__all__ = ["ResumableSampler"]

T = TypeVar("T")


class ResumableSampler(DistributedSampler[Any]):
    """Gives each rank its part of an epoch, from any sample of it on.

    Without a restored state it gives what torch's ``DistributedSampler`` does, in the same order. The class is one of
    these, so that Lightning and Fabric leave it in place.

    Args:
        dataset: a dataset with a length, whose samples are numbered.
        seed, shuffle: the order of epoch ``e`` is the permutation of seed ``seed + e``, or ascending.
        drop_last: leaves out the samples at an epoch's end that do not divide by the ranks, ``num_replicas - 1`` at
            most. Otherwise some of the order's first samples come again there, so that ranks have equally many.
        num_replicas, rank: the data-parallel ranks. By default those of the strategy, or of torch's default process
            group, or one.

    Attributes:
        epoch: the number of the epoch; :meth:`set_epoch` sets it.
    """

    # the base's __init__ is not called: it wants a process group before a Trainer has made one
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
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = 0
        self._given = None if num_replicas is None or rank is None else (num_replicas, rank)
        self._ranks: tuple[int, int] | None = self._given
        self._multiple: int | None = None
        self._start = 0  # samples of the epoch that were consumed before the pass under way
        self._pass: _Pass | None = None

    # --- ranks -------------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return self._num_and_rank()[0]

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._num_and_rank()[1]

    def _num_and_rank(self) -> tuple[int, int]:
        if self._ranks is not None:
            return self._ranks
        # asked for when it is needed: a loader is often made before the process group
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size(), torch.distributed.get_rank()
        return 1, 0

    def divide(self, num_replicas: int, rank: int) -> None:
        """Divides samples among these ranks, unless the constructor was given others."""
        self._ranks = self._given or (num_replicas, rank)

    def divide_by_batches(self, multiple: int) -> None:
        """Yields the full order, which the framework divides, padded to a multiple of ``multiple`` samples."""
        self._ranks, self._multiple = (1, 0), multiple

    # --- the order ---------------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples that this rank has in a full epoch."""
        return self._share(self._size)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        return self.num_samples * self.num_replicas

    @property
    def _size(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type] # which the constructor has checked

    def _share(self, num_samples: int) -> int:
        num_replicas = self.num_replicas
        return num_samples // num_replicas if self.drop_last else math.ceil(num_samples / num_replicas)

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return _Indices(self)

    def indices_from(self, start: int) -> list[int]:
        """Lists this rank's samples of the epoch, behind the first ``start`` of the order."""
        order = self._order()
        left, multiple = order[start:], self._multiple or self.num_replicas
        if self.drop_last and self._multiple is None:
            left = left[: len(left) // multiple * multiple]
        elif missing := -len(left) % multiple:
            # the order's beginning, whatever the run began with: a run that was cut ends like one that was not
            left = torch.cat([left, order.repeat(math.ceil(missing / len(order)))[:missing]])
        indices: list[int] = left[self.rank :: self.num_replicas].tolist()
        return indices

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self._size, device="cpu")
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self._size, generator=generator, device="cpu")

    # --- the place in it ---------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. The one that was restored, and has not been gone on with, keeps its place."""
        if epoch != self.epoch or self._pass is not None:
            self._start = 0
        self.epoch, self._pass = epoch, None

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yields the loader's batches, and counts each as consumed when it is handed over.

        For a user's own loop. Workers read ahead, so the sampler itself cannot know what was trained. The end begins
        the next epoch; so does another pass after one that was left early.
        """
        return self.count(loader, self.num_replicas * batch_size_of(loader))

    def count(
        self, loader: Iterable[T], samples_per_batch: int, num_waiting: Callable[[], int] = lambda: 0
    ) -> Iterator[T]:
        """Yields and counts batches as :meth:`batches` does.

        Args:
            loader: yields this rank's batches.
            samples_per_batch: the number of samples that all ranks consume with one.
            num_waiting: the number of batches that were taken from the loader and not handed over.
        """
        if self._pass is not None:
            self.set_epoch(self.epoch + 1)
        under_way = self._pass = _Pass(samples_per_batch, num_waiting)
        for batch in loader:
            under_way.num_batches += 1
            yield batch
        # a state may have been loaded meanwhile, or another epoch begun
        if self._pass is under_way:
            self.set_epoch(self.epoch + 1)

    @property
    def consumed(self) -> int:
        """The number of samples of this epoch that all ranks together have consumed."""
        if self._pass is None:
            return self._start
        return min(self._start + self._pass.num_consumed(), self._size)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place, the same on every rank: plain numbers, for any checkpoint."""
        return self.state_at(self.epoch, self.consumed)

    def state_at(self, epoch: int, consumed: int) -> dict[str, Any]:
        """Returns the state for another place."""
        place = {"epoch": epoch, "consumed": consumed}
        return place | {"num_samples": self._size, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a place that any number of ranks has saved.

        Raises:
            ValueError: if the order is another one: the dataset's length, the seed or ``shuffle`` has changed.
        """
        own = self.state_at(0, 0)
        changed = [name for name in ("num_samples", "seed", "shuffle") if state_dict[name] != own[name]]
        if changed:
            name = changed[0]
            raise ValueError(
                f"the place in the data was saved with {name}={state_dict[name]}, and this sampler has "
                f"{name}={own[name]}: samples would be trained twice, or never. Use the same dataset and sampler, or "
                "leave the sampler's state out to begin the epoch anew"
            )
        self.epoch, self._start, self._pass = state_dict["epoch"], state_dict["consumed"], None

    # --- places by the number of batches, for loops that count them --------------------------------------------------

    def num_batches_before(self, loader: DataLoader[Any]) -> int:
        """Counts the epoch's batches before the restored place, in batches of this loader.

        It is the difference of the epoch's length and of the batches that are left, so that an epoch always ends with
        its last number. Earlier batches may have been of another size, on other ranks.
        """
        per_rank, size = self._share(self._size - self._start), batch_size_of(loader)
        is_short_one_left_out = getattr(loader.batch_sampler, "drop_last", loader.drop_last)
        return len(loader) - (per_rank // size if is_short_one_left_out else math.ceil(per_rank / size))

    def consumed_after(self, num_batches: int, loader: DataLoader[Any]) -> int:
        """Counts consumed samples where ``num_batches`` of the epoch are done, those before the restored place too."""
        num_done = num_batches - self.num_batches_before(loader)
        return min(self._start + num_done * batch_size_of(loader) * self.num_replicas, self._size)


@dataclasses.dataclass
class _Pass:
    """Counts the batches of a pass over a loader."""

    samples_per_batch: int
    num_waiting: Callable[[], int]
    num_batches: int = 0

    def num_consumed(self) -> int:
        return max(0, self.num_batches - self.num_waiting()) * self.samples_per_batch


class _Indices(Iterator[int]):
    """Yields a rank's samples. torchdata's loader saves its state with each batch, and so counts without workers."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler
        self._indices: list[int] | None = None
        self._start = 0
        self._num_yielded = 0

    def __next__(self) -> int:
        # not before the first: frameworks set the epoch when the loader's iterator is there already
        if self._indices is None:
            self._start = self._sampler._start
            self._indices = self._sampler.indices_from(self._start)
        if self._num_yielded == len(self._indices):
            raise StopIteration
        self._num_yielded += 1
        return self._indices[self._num_yielded - 1]

    def state_dict(self) -> dict[str, Any]:
        start = self._sampler._start if self._indices is None else self._start
        consumed = start + self._num_yielded * self._sampler.num_replicas
        return self._sampler.state_at(self._sampler.epoch, min(consumed, self._sampler._size))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state_dict)
        self._indices, self._num_yielded = None, 0


class CountedLoader:
    """Wraps a loader and counts the batches taken from it for its sampler; otherwise it behaves as the loader."""

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: ResumableSampler,
        samples_per_batch: int,
        num_waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self._loader, self._sampler = loader, sampler
        self._samples_per_batch, self._num_waiting = samples_per_batch, num_waiting

    def __iter__(self) -> Iterator[Any]:
        return self._sampler.count(self._loader, self._samples_per_batch, self._num_waiting)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # a copy that is being made has nothing yet, and to ask for it would come here again
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Frameworks ask whether it is a DataLoader."""
        return type(self._loader)


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
    # a loader without batches has samples, and a batch sampler its own size
    size = getattr(loader, "batch_size", None) or getattr(loader.batch_sampler, "batch_size", None)
    if size is None and loader.batch_sampler is not None:
        raise ValueError(
            f"{type(loader.batch_sampler).__name__} has no batch_size: a ResumableSampler counts batches of one size. "
            "Give it this attribute if its batches are, else use another sampler"
        )
    return 1 if size is None else int(size)


# --- loaders that all replicas divide ---------------------------------------------------------------------------------


def samplers_of(loader: Any) -> list[Any]:
    """Returns the sampler of a loader, and that of its batch sampler."""
    return [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]


def check_order(option: str, *samplers: Any) -> None:
    """Raises ValueError for a sampler whose place or order a replica that comes back would not have.

    Such a process has drawn other random numbers than those that trained on. ``option``: the user's, for the error.
    """
    for sampler in samplers:
        if isinstance(sampler, ResumableSampler):
            raise ValueError(
                f"{option} and a ResumableSampler, whose place a replica that comes back would not have: leave it out, "
                "and set replicas.epoch and replicas.batch after a checkpoint is loaded"
            )
        draws = hasattr(sampler, "generator") and not isinstance(sampler, RandomSampler)
        if draws and not hasattr(sampler, "set_epoch"):
            raise ValueError(
                f"{option} and a {type(sampler).__name__}, whose order is drawn from random numbers that a replica "
                "that comes back does not have: pass shuffle=True, or a sampler with set_epoch() whose order follows "
                "from the epoch's number"
            )


def follow_epochs(number: Callable[[], int], *owners: Any) -> None:
    """Lets ``set_epoch`` of samplers or loaders set this number: a replica that comes back has made no pass itself."""
    for owner in owners:
        if hasattr(owner, "set_epoch"):
            set_epoch = functools.partial(type(owner).set_epoch, owner)
            owner.set_epoch = lambda _, set_epoch=set_epoch: set_epoch(number())
