"""A loader that saves its place for the same number of ranks, as torchdata's ``StatefulDataLoader`` does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class StatefulLoader(DataLoader[Any]):
    """Counts the batches that its reader was given. An epoch that is complete is followed by a new one."""

    num_batches = 0
    num_skipped = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.num_batches = self.num_skipped
        batches = itertools.islice(super().__iter__(), self.num_skipped, None)
        self.num_skipped = 0
        for batch in batches:
            self.num_batches += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_skipped = state["num_batches"] % len(self)
