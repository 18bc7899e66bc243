"""One intra-op thread everywhere: ranks are threads or processes here, and share two cores.

Processes of ranks are forks of one server a worker, which imports the frameworks when the first of them is asked for.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
import torch

from .support.tiers import mark_long, part

torch.set_num_threads(1)
multiprocessing.set_forkserver_preload(["tests.doors.fits", "tests.support.preloaded"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="of the files with tests to run, each N-th from the K-th on")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Before -m chooses among the tests, and after it."""
    mark_long(items, config.args)
    yield
    if which := config.getoption("part"):
        chosen = part(items, which)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
