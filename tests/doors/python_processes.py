"""A Python process of its own, for what cannot be shown inside the tests': imports, launchers, scripts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import megastrategy

from ..support.patience import HANG_S


def run_python(
    *arguments: str,
    cwd: Path | None = None,
    autoload: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = HANG_S,
) -> str:
    """Output and errors of a Python of its own, which must succeed. ``autoload``: torch calls its entry points."""
    [output] = run_pythons(arguments, [environment or {}], cwd=cwd, autoload=autoload, timeout_s=timeout_s)
    return output


def run_pythons(
    arguments: Iterable[str],
    environments: Iterable[Mapping[str, str]],
    *,
    cwd: Path | None = None,
    autoload: bool = False,
    timeout_s: float = HANG_S,
    returncode: int = 0,
) -> list[str]:
    """The same command in several processes at once, each with more variables in its environment. All of them have to
    end with ``returncode``: -n for signal n."""
    base = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "NODE_RANK")}
    base |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(Path(megastrategy.__file__).parents[1]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0",
    }
    command = [sys.executable, *arguments]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=base | dict(environment),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for environment in environments
        ]
        try:
            outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == returncode, output
    return outputs
