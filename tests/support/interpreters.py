"""Tests marked ``fresh`` always start new interpreters; no other test does, except for scripts in the long tier.

They are about what a fork of a process that has its imports cannot show: what importing does, launchers, programs that
people start, memory and threads at the end of a process.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .scripts import FRESH_SCRIPTS

started: list[str] = []
"""Commands of the interpreters that this process has started since the test began."""


def note_interpreters() -> None:
    """Notes each of them from now on."""
    init = subprocess.Popen.__init__

    @functools.wraps(init)
    def noting(popen: Any, args: Any, *rest: Any, **options: Any) -> None:
        command = [args] if isinstance(args, str | os.PathLike) else list(args)
        if Path(os.fsdecode(command[0])).name.startswith("python"):
            started.append(" ".join(os.fsdecode(part) for part in map(str, command))[:200])
        init(popen, args, *rest, **options)

    subprocess.Popen.__init__ = noting  # type: ignore[method-assign]


def assert_may_start(node: pytest.Item) -> None:
    """Who starts interpreters says so, so that their number is known: each costs seconds of imports."""
    is_fresh = node.get_closest_marker("fresh") is not None or FRESH_SCRIPTS
    assert is_fresh or not started, f"not marked fresh, but starts: {started}"
