"""Each test leaves all replicas that it made in this process."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastrategy import _replicas

ENDS_IN_S = 10.0


def torchfts_threads() -> dict[str, str]:
    """The threads of torchft's managers, clients and lighthouses, which Python does not know: names by number."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names[task.name] = (task / "comm").read_text().strip()
    return {
        task: name for task, name in names.items() if name.startswith(("torchft-man", "torchft-mgr", "torchft-light"))
    }


def left_threads(before: set[threading.Thread], native: dict[str, str]) -> list[str]:
    """The threads that were not there before and do not end by themselves."""
    gc.collect()  # a manager's threads end with it
    after = [thread for thread in threading.enumerate() if thread not in before]
    targets = {thread: getattr(thread, "_target", None) for thread in after}
    # The server of a state is ended in another thread, which takes half a second.
    ending = [thread._args[0] for thread in after if targets[thread] is _replicas._end_server]  # type: ignore[attr-defined]
    left = [
        f"{thread.name}: {target}"
        for thread, target in targets.items()
        if target is not _replicas._end_server and getattr(target, "__self__", None) not in ending
    ]
    return left + [name for task, name in torchfts_threads().items() if task not in native]


@pytest.fixture(autouse=True)
def replicas_are_left() -> Iterator[None]:
    """Fails for a server, a manager or a thread of replicas that a test leaves: a later test may die of it."""
    before, native = set(threading.enumerate()), torchfts_threads()
    yield
    deadline = time.monotonic() + ENDS_IN_S
    while left := left_threads(before, native):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
