"""Says whether the process of another rank on this machine has ended.

A rank that waits for an ended process waits in vain, and must not wait for long: Lightning's launcher looks at its
processes every 5 s, and kills the rest when one has ended.
"""

from __future__ import annotations

import os
from pathlib import Path


def identity() -> str:
    """Returns this process's machine, namespace of process numbers, and number."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino} {os.getpid()}"


def has_ended(other: str) -> bool:
    """Returns whether a process, by its :func:`identity`, is known to have ended; False for one of another machine."""
    *here, _ = identity().split()
    *there, number = other.split()
    if here != there:
        return False
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    # the state follows the program's name, which is in parentheses; a zombie has ended, and its parent has not asked
    return stat.rpartition(")")[2].split()[0] in "ZX"
