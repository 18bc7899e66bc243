"""Versions of what is checked with."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import platform
import re
from typing import Any

import torch

import megastrategy

from ..commit import current_commit

KNOWN_TORCH = ((2, 10), (2, 15))
"""The first and the last release that this was written for."""

SHARES_A_GPU = (2, 30)
"""The first NCCL that takes several ranks on one GPU."""


def torch_release() -> tuple[int, int]:
    """torch's, as two numbers."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def nccl_version() -> tuple[int, ...]:
    """The NCCL that is loaded in this process: another one than torch was built with, if one was preloaded."""
    code = ctypes.c_int()
    for name in (None, "libnccl.so.2"):
        with contextlib.suppress(OSError, AttributeError):
            if ctypes.CDLL(name).ncclGetVersion(ctypes.byref(code)) == 0:
                return parse_nccl(code.value)
    # Linked into torch, whose names are not visible outside.
    return tuple(torch.cuda.nccl.version())


def parse_nccl(code: int) -> tuple[int, int, int]:
    """NCCL's own number, as three; 22704 is 2.27.4, and before 2.9 another scheme."""
    if code < 10_000:
        return code // 1000, code // 100 % 10, code % 100
    return code // 10_000, code // 100 % 100, code % 100


def has_numpy() -> bool:
    """Whether torch finds it; it is installed without, and asks for it where objects are gathered."""
    try:
        torch.empty(0).numpy()
    except RuntimeError:
        return False
    return True


def describe() -> dict[str, Any]:
    """For the JSON: what can be said without touching a device."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": current_commit(),
        "megastrategy": megastrategy.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
