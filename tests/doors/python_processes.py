"""A Python process of its own, for what cannot be shown inside the tests': imports, launchers, scripts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import megastrategy

from ..support.timeouts import HANG_S


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
    end with ``returncode``: -n for signal n. If one does not, the others are ended, and all outputs shown."""
    base = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "NODE_RANK")}
    base |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(Path(megastrategy.__file__).parents[1]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0",
    }
    command = [sys.executable, *arguments]
    with contextlib.ExitStack() as stack:
        outputs, processes = list[IO[str]](), list[subprocess.Popen[str]]()
        for environment in environments:
            outputs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            processes.append(
                stack.enter_context(
                    subprocess.Popen(
                        command,
                        cwd=cwd,
                        env=base | dict(environment),
                        stdout=outputs[-1],
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
            )
        deadline = time.monotonic() + timeout_s
        try:
            # Until one ends in another way: the others may wait for it.
            while None in (codes := {process.poll() for process in processes}) and codes <= {None, returncode}:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
        for output in outputs:
            output.seek(0)
        texts = [output.read() for output in outputs]
    assert codes == {returncode}, "\n".join(texts)
    return texts
