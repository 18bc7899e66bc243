"""An error of hosts that do not connect says which setting changes that, and what this machine has."""

from __future__ import annotations

import re
import socket

from megastrategy._faults.interfaces import add_way_out, interfaces

FULL_MESH = "Gloo connectFullMesh failed with [...] Connection refused, remote=[127.0.1.1]:1415$1"


def test_every_interface_is_named_with_its_address() -> None:
    found = interfaces()
    assert "lo (127.0.0.1)" in found
    assert [text.partition(" ")[0] for text in found] == [name for _, name in socket.if_nameindex()]


def test_the_way_out_is_added_to_gloos_error_alone() -> None:
    error = RuntimeError(FULL_MESH)
    add_way_out(error)
    [note] = error.__notes__
    assert "Set GLOO_SOCKET_IFNAME on every machine" in note
    assert re.search(rf"and {re.escape(socket.gethostname())} (resolves to [\d.]+|does not resolve)\.", note)
    assert note.endswith(", ".join(interfaces()))
    other = RuntimeError("The client socket has timed out after 60000ms while trying to connect to (host, 29500)")
    add_way_out(other)
    assert not hasattr(other, "__notes__")
