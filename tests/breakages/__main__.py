"""python -m tests.breakages [--only WORDS] [--write FILE]: puts each fault in, one at a time, and runs its tests.

In a copy of the tree. ``--write`` makes docs/breakages.md. The exit status is the number of faults that no test saw.
A test sees a fault if it fails or ends the process. Tests that hang, are not found or cannot be read have seen nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from .breakage import Breakage
from .catalogue import BREAKAGES

ROOT = Path(__file__).parents[2]
COPIED = (
    "megastrategy",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "megastrategy_autoload.py",
    "pyproject.toml",
    "README.md",
)
LIMIT_S = 300
"""Seconds for the tests of one fault. Each test alone is ended after 120 s, which counts as its failure."""


def first_red(breakage: Breakage, tree: Path) -> str | None:
    """The first test that fails with the fault in place; None if all pass."""
    path = tree / "megastrategy" / breakage.file
    text = path.read_text(encoding="utf-8")
    path.write_text(breakage.apply(text), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=120",
        *breakage.tests.split(),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output = process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return None
        finally:
            path.write_text(text, encoding="utf-8")
    if process.returncode == pytest.ExitCode.OK:
        return None
    if process.returncode != pytest.ExitCode.TESTS_FAILED and process.returncode > 0:
        raise RuntimeError(
            f"{breakage.what}: pytest ended with {process.returncode}, before any test:\n{output[-2000:]}"
        )
    named = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?)(?:\[| |$)", output, re.MULTILINE) or re.findall(
        r"(tests/\S+::\w+)", output
    )
    return named[0] if named else f"the process ends by {signal.Signals(-process.returncode).name}"


PAGE = """# What the tests see

Each fault of [the catalogue](../tests/breakages/catalogue.py) was put into a copy of the package, alone, and the tests
that it names were run, until the first failed:

```bash
.venv/bin/python -m tests.breakages
```

Written on {date}, with torch {torch}: {seen} of {all} were seen.

| fault | in | the first test that fails |
|---|---|---|
{rows}
"""


def page(reds: dict[str, str | None]) -> str:
    """Makes the page that ``--write`` writes."""
    rows = [f"| {b.what} | `{b.file}` | `{reds[b.what] or 'none'}` |" for b in BREAKAGES if b.what in reds]
    seen = sum(red is not None for red in reds.values())
    version = importlib.metadata.version("torch").partition("+")[0]
    return PAGE.format(date=datetime.date.today(), torch=version, seen=seen, all=len(reds), rows="\n".join(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the faults whose words or file have this in them")
    parser.add_argument("--write", type=Path, help="a page with what came of them")
    arguments = parser.parse_args()
    chosen = [b for b in BREAKAGES if arguments.only in b.what or arguments.only in b.file]
    if not chosen:
        parser.error(f"no fault has {arguments.only!r} in its words or its file")
    reds: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        for number, breakage in enumerate(chosen, 1):
            start = time.monotonic()
            reds[breakage.what] = first_red(breakage, Path(folder))
            took = time.monotonic() - start
            sys.stdout.write(
                f"{number}/{len(chosen)} {breakage.what} ({took:.0f} s): {reds[breakage.what] or 'NOT SEEN'}\n"
            )
            sys.stdout.flush()
    if arguments.write is not None:
        arguments.write.write_text(page(reds), encoding="utf-8")
    unseen = [what for what, red in reds.items() if red is None]
    sys.stdout.write(f"{len(reds) - len(unseen)} of {len(reds)} seen\n")
    return len(unseen)


if __name__ == "__main__":
    sys.exit(main())
