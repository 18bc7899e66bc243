"""The batches of a fit on two ranks, for references that train by hand in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from .fits import loader


def batches(epoch: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Rank 0's and rank 1's batches of :func:`~tests.doors.fits.loader`, as Lightning shuffles and divides them."""
    whole = loader()
    halves: list[DataLoader[Any]] = []
    for rank in range(2):
        sampler = DistributedSampler(whole.dataset, 2, rank, shuffle=True, seed=0)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        halves.append(DataLoader(whole.dataset, batch_size=whole.batch_size, sampler=sampler))
    yield from zip(*halves, strict=True)
