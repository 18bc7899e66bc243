"""Ports for process groups that tests start."""

from __future__ import annotations

import atexit
import random
import socket

_PORTS = range(10_000, 30_000)
"""Below those that Linux hands out by itself (32768 and more). One of those would be free when it is asked for, and
an outgoing connection by the time that rank 0 listens on it: its ranks then wait for a store for good."""

_reservations: list[socket.socket] = []
"""UDP sockets at the last ports, until rank 0 listens there by TCP: other test processes then choose other ports."""


@atexit.register
def _close_reservations() -> None:
    while _reservations:
        _reservations.pop().close()


def free_port() -> int:
    """A free port of this machine."""
    draw = random.SystemRandom()  # tests seed the other one
    while True:
        port = draw.choice(_PORTS)
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", port))
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", port))
        except OSError:  # it is in use
            reservation.close()
            continue
        _reservations.append(reservation)
        if len(_reservations) > 100:
            _reservations.pop(0).close()
        return port
