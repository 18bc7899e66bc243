"""torch.distributed.checkpoint among ranks that are threads, whose groups torch.distributed does not know."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar
from unittest import mock

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver

T = TypeVar("T")


def gather_objects(group: ProcessGroup, value: T) -> list[T]:
    """Every rank's, by rank, through the group's store."""
    store, rank = group.get_group_store(), group.rank()
    number = store.add(f"objects of rank {rank}", 1)
    store.set(f"object {number} of rank {rank}", pickle.dumps(value))
    keys = [f"object {number} of rank {other}" for other in range(group.size())]
    store.wait(keys, timedelta(seconds=30))
    return [pickle.loads(store.get(key)) for key in keys]


class _AmongThreads(state_dict_saver._DistWrapper):  # type: ignore[name-defined]
    """The exchange of plans and results, which is torch's; how an object gets from rank to rank is ours."""

    def __init__(self, group: ProcessGroup, use_dist: bool, coordinator_rank: int) -> None:
        super().__init__(group, False, coordinator_rank)
        self.rank = group.rank()
        self.is_coordinator = self.rank == 0

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        size: int = self.group.size()
        return size

    def all_gather_object(self, object: Any) -> list[Any]:
        return gather_objects(self.group, object)

    def gather_object(self, object: Any) -> list[Any]:
        return gather_objects(self.group, object)

    def broadcast_object(self, object: Any) -> Any:
        return gather_objects(self.group, object)[0]

    def scatter_object(self, object_list: Any) -> Any:
        return gather_objects(self.group, object_list)[0][self.rank]

    def barrier(self) -> None:
        gather_objects(self.group, None)


@contextlib.contextmanager
def saving_among_threads() -> Iterator[None]:
    """Threads that save meanwhile are the ranks of the group they pass. Entered by the thread that starts them."""
    with mock.patch.object(state_dict_saver, "_DistWrapper", _AmongThreads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
