"""For tests of what not every machine has: interpreters with a few packages more, and commands that may not be had."""

from __future__ import annotations

import site
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CANNOT_BE_HAD = 75
"""The status of scripts that need what this machine has not: EX_TEMPFAIL of sysexits.h."""


def python_with(folder: Path, *requirements: str, imports: str) -> Path:
    """An interpreter that can import ``imports``: this one, or that of an environment in ``folder``.

    Skips the test where pip cannot get the requirements. What this environment has is taken from it: the test is of the
    same torch.
    """
    if find_spec(imports) is not None:
        return Path(sys.executable)
    environment = folder / "environment"
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    [packages] = environment.glob("lib/python*/site-packages")
    # after its own; addsitedir and not the path alone, for packages that are installed in place
    outer = "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())
    (packages / "outer.pth").write_text(f"import site; {outer}\n")
    done = subprocess.run([python, "-m", "pip", "install", "-q", *requirements], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(requirements)} here: {done.stderr.strip().splitlines()[-1]}")
    return python


def run_or_skip(command: Sequence[str | Path], needs: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a script that says by its status that it cannot be had here, which skips the test; ``needs``: for what."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode == CANNOT_BE_HAD:
        pytest.skip(f"cannot be had here, needs {needs}: {done.stderr.strip()}")
    return done
