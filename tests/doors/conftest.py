"""Rank processes for the tests of a file: a pair, one that is alone, four, and those of ``accelerate launch``.

They end with the file: torch keeps the groups of their jobs by name, and gloo wakes a thread of each group a hundred
times a second. Kept to the end, they took a fifth of the machine while other tests ran. A new pair costs a tenth of a
second.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .accelerate_loops import Worlds
from .rank_processes import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes that run a function under ``Trainer(devices=2)``."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    """One process that runs a function under ``Trainer(devices=1)``."""
    pool = Ranks(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def mesh() -> Iterator[Ranks]:
    """Four processes, for the tests of a file that divide a model among ranks."""
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Processes that run a function as ``accelerate launch`` would, by the number of ranks."""
    pools = Worlds()
    yield pools
    pools.close()
