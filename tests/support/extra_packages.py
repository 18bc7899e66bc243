"""Interpreters that have this one's packages and a few more, for tests of what is not installed for all of them."""

from __future__ import annotations

import site
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


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
