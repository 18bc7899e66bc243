"""Each test leaves all replicas that it made in this process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastrategy import _replicas

ENDS_IN_S = 10.0


def torchfts_threads() -> set[str]:
    """The threads of torchft's managers, clients and lighthouses, which Python does not know."""
    names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    return {name for name in names if name.startswith(("torchft-manager", "torchft-mgr", "torchft-light"))}


def servers_that_end(threads: list[threading.Thread]) -> list[object]:
    """The servers of states that are ended in another thread, which takes them half a second."""
    return [thread._args[0] for thread in threads if thread._target is _replicas._end_server]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def replicas_are_left() -> Iterator[None]:
    """Fails for a server, a manager or a thread of replicas that a test leaves: a later test may die of it."""
    before = set(threading.enumerate())
    yield
    gc.collect()  # a manager's threads end with it
    after = [thread for thread in threading.enumerate() if thread not in before]
    ending = servers_that_end(after)
    for thread in after:
        target = thread._target  # type: ignore[attr-defined]
        if target is not _replicas._end_server and getattr(target, "__self__", None) not in ending:
            thread.join(ENDS_IN_S)
            assert not thread.is_alive(), f"{thread.name} is left: {target}"
    assert not torchfts_threads()
