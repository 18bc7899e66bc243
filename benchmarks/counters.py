"""Counts what a rank holds and receives, from the kernel, the C library and the garbage collector. Linux only."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_TCPI_BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` in the kernel's ``struct tcp_info``: payload, no headers, no retransmissions."""


_MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def heap_bytes() -> int | None:
    """Bytes that are allocated and not freed, by torch and everything else that calls malloc. None without glibc."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def resident_bytes() -> tuple[int, int]:
    """The process's resident memory now, and its highest since the process was forked."""
    kib = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            kib[name] = int(value.split()[0])
    return kib["VmRSS"] * 1024, kib["VmHWM"] * 1024


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that the storages of all tensors known to Python cover, overlaps counted once, except for activations.

    Args:
        tensors: counted in addition to those that the garbage collector knows. A ``.grad`` that no code has read yet
            is not among them.
    """
    spans = set()
    for tensor in [*tensors, *(obj for obj in gc.get_objects() if issubclass(type(obj), Tensor))]:
        # A DTensor holds nothing itself, and neither do the tensors that torch.compile traces with. What has a history
        # belongs to a graph, which dies with its backward.
        holds_memory = not (is_traceable_wrapper_subclass(tensor) or isinstance(tensor, FakeTensor))
        if holds_memory and tensor.grad_fn is None:
            storage = tensor.untyped_storage()
            spans.add((storage.data_ptr(), storage.nbytes()))
    total, reached = 0, 0
    for start, nbytes in sorted(spans):
        end = start + nbytes
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def tcp_sockets() -> Iterator[socket.socket]:
    """Yields each TCP socket of this process, as a duplicate that is closed again afterwards."""
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:  # the listing itself was one of them, and is closed by now
            continue
        if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as handle:
            if handle.family in (socket.AF_INET, socket.AF_INET6) and handle.type == socket.SOCK_STREAM:
                yield handle


def payload_received_bytes() -> int:
    """Counts the bytes that all TCP sockets of this process have received."""
    received = 0
    for handle in tcp_sockets():
        info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCPI_BYTES_RECEIVED + 8)
        received += struct.unpack_from("Q", info, _TCPI_BYTES_RECEIVED)[0]
    return received


def interface_received_bytes(interface: str) -> int:
    """Counts the bytes that a network interface of this process's namespace has received, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[0])
    raise ValueError(f"no network interface {interface!r}")
