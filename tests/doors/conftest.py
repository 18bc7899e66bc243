"""One pair of rank processes for all tests of the doors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .rank_processes import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes that run a function under ``Trainer(devices=2)``."""
    pool = Ranks()
    yield pool
    pool.close()
