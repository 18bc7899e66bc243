"""For tests of what not every machine has: interpreters with a few packages more, sources of other projects, and
commands that may not be had."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

CANNOT_BE_HAD = 75
"""The status of scripts that need what this machine has not: EX_TEMPFAIL of sysexits.h."""

ANSWERS_WITHIN_S = 120.0
"""A firewall may drop what git sends, and would have the test wait for as long as it may."""


def python_with(folder: Path, *requirements: str, imports: str) -> Path:
    """An interpreter that can import ``imports``: this one, or that of an environment in ``folder``.

    Skips the test where pip cannot get the requirements. What this environment has is taken from it, and torch always:
    the test is of the same one, and its dependents are those that go with it.
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
    command = [python, "-m", "pip", "install", "-q", f"torch=={torch.__version__}", *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(requirements)} here: {done.stderr.strip().splitlines()[-1]}")
    return python


def sources_of(folder: Path, repository: str, version: str, *paths: str) -> Path:
    """A checkout in ``folder`` of these folders of a public repository (``"https://..."``), as they are at a tag or
    commit.

    Skips the test if git cannot get it. Nothing of it is kept. For a machine that reaches only a mirror, configure git:
    ``git config --global url.MIRROR.insteadOf REPOSITORY``.
    """
    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    checkout = folder / repository.rpartition("/")[2]
    checkout.mkdir(parents=True)
    environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    for arguments in (
        ["init", "--quiet"],
        ["remote", "add", "origin", repository],
        # of these folders alone: a whole repository may have hundreds of MB
        ["sparse-checkout", "set", *paths],
        ["fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", version],
        ["-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"],
    ):
        command = ["git", "-C", checkout, *arguments]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{repository} does not answer within {ANSWERS_WITHIN_S:.0f} s")
        if done.returncode:
            pytest.skip(f"git cannot get {version} of {repository} here: {done.stderr.strip().splitlines()[-1]}")
    missing = [path for path in paths if not (checkout / path).is_dir()]
    assert not missing, f"{version} of {repository} has no {', '.join(missing)}"
    return checkout


def run_or_skip(command: Sequence[str | Path], needs: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a script that says by its status that it cannot be had here, which skips the test; ``needs``: for what."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode == CANNOT_BE_HAD:
        pytest.skip(f"cannot be had here, needs {needs}: {done.stderr.strip()}")
    return done
