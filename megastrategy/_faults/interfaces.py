"""Names the remedy where the ranks' hosts do not connect: gloo names an address, not the setting that changes it."""

from __future__ import annotations

import fcntl
import socket
import struct

import torch

_SIOCGIFADDR = 0x8915  # Linux's request for an interface's IPv4 address


def add_way_out(error: BaseException) -> None:
    """Adds a note to an error of making the default group with gloo, with the interfaces of this machine.

    A group that is made already, or whose store was not found, has another problem.
    """
    if torch.distributed.is_initialized() or not could_not_connect(error):
        return
    name = socket.gethostname()
    try:
        address = f"resolves to {socket.gethostbyname(name)}"
    except OSError:
        address = "does not resolve"
    error.add_note(f"gloo listens where the machine's name leads to, and {name} {address}. {way_out()}")


def could_not_connect(error: BaseException) -> bool:
    """Whether gloo did not connect all ranks."""
    return "connectFullMesh" in str(error)


def way_out() -> str:
    """Returns how to choose another interface."""
    return (
        "Set GLOO_SOCKET_IFNAME on every machine to an interface that the others reach; here there are "
        f"{', '.join(interfaces())}"
    )


def interfaces() -> list[str]:
    """The interfaces of this machine, each with its IPv4 address if it has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                found.append(name)
            else:
                found.append(f"{name} ({socket.inet_ntoa(answer[20:24])})")
    return found
