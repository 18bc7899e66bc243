"""Bounds how long tests wait before they call it a hang, and shows where processes wait."""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

HANG_S = 600.0
"""Nothing is asserted by it: a loaded machine was seen to take ten times as long as a quiet one."""

REPORT_S = 60.0
"""Seconds until the stacks of a test and of its ranks are written to stderr; it goes on after that."""


@contextlib.contextmanager
def stacks_written_after(seconds: float) -> Iterator[None]:
    """Writes the stacks of this process and of the processes that it started, unless this is closed before."""
    timer = threading.Timer(seconds, write_stacks)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def write_stacks() -> None:
    """Writes them to stderr with py-spy: native frames too, since a rank that hangs mostly waits inside gloo.

    The kernel has to allow it: for root, or with ``kernel.yama.ptrace_scope=0``. Where it does not, ranks still write
    Python's stacks themselves, with faulthandler.
    """
    py_spy = str(Path(sys.executable).with_name("py-spy"))
    this = psutil.Process()
    children = [child.pid for child in this.children(recursive=True) if "python" in child.name()]
    ranks = [process.pid for process in multiprocessing.active_children()]  # children of a fork server
    for pid in dict.fromkeys([this.pid, *ranks, *children]):
        subprocess.run([py_spy, "dump", "--native", "--pid", str(pid)], stdout=2, stderr=2, check=False)
