"""One fork server for all workers: importing the frameworks takes it seven seconds of a processor.

In multiprocessing each process has a server of its own, and cannot name another's.
"""

from __future__ import annotations

import multiprocessing.context
import os
from multiprocessing import forkserver, reduction, resource_tracker
from typing import Any

_SERVER: Any = forkserver._forkserver
"""The module's only object, whose methods are its functions."""


class Forked(multiprocessing.context.ForkServerProcess):
    """A fork that writes where its parent writes, and not where the server does: pytest shows it with its test."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_outputs": [reduction.DupFd(descriptor) for descriptor in (1, 2)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for descriptor, output in zip((1, 2), state.pop("_outputs"), strict=True):
            os.dup2(output.detach(), descriptor)
        self.__dict__.update(state)


def start() -> tuple[str, bytes | None]:
    """Starts this process's server, if there is none, and returns what others need to reach it. It ends with this
    process."""
    _SERVER.ensure_running()
    return _SERVER._forkserver_address, getattr(_SERVER, "_forkserver_authkey", None)


def use(address: str, authkey: bytes | None) -> None:
    """Lets this process's forks come from that server."""
    _SERVER._forkserver_address = address
    if authkey is not None:  # since Python 3.14
        _SERVER._forkserver_authkey = authkey
    # Forks inherit the pipe that keeps their server alive. This one lives as long as the process that started it.
    _SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    _SERVER.ensure_running = resource_tracker.ensure_running
    multiprocessing.context.ForkServerContext.Process = Forked  # type: ignore[misc]
