"""Ports for process groups that tests start."""

from __future__ import annotations

import random
import socket

_PORTS = range(10_000, 30_000)
"""Below those that Linux hands out by itself (32768 and more). One of those would be free when it is asked for, and
an outgoing connection by the time that rank 0 listens on it: its ranks then wait for a store for good."""


def free_port() -> int:
    """A free port of this machine."""
    draw = random.SystemRandom()  # tests seed the other one
    while True:
        port = draw.choice(_PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:  # it is in use
                continue
        return port
