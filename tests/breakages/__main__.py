"""python -m tests.breakages [--only WORDS] [--jobs N] [--write FILE]: puts each fault in and runs its tests.

One at a time in a copy of the tree; ``--jobs 2`` makes two copies. ``--write`` makes
docs/project/breakages.md, from all faults only. The exit status is the number of faults that no test saw.
A test sees a fault if it fails or ends the process. Tests that hang, are not found or cannot be read have seen nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .breakage import BREAKAGES, Breakage

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
    path, broken = breakage.apply(tree / "megastrategy")
    text = path.read_text(encoding="utf-8")
    path.write_text(broken, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=120",
        *breakage.tests,
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

The faults of [the catalogue](../../tests/breakages/catalogue.txt) were put into a copy of the package, one at a time.
Each names tests, which ran until the first failed:

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
    rows = [f"| {b.what} | `{b.place}` | `{reds[b.what] or 'none'}` |" for b in BREAKAGES if b.what in reds]
    seen = sum(red is not None for red in reds.values())
    version = importlib.metadata.version("torch").partition("+")[0]
    return PAGE.format(date=datetime.date.today(), torch=version, seen=seen, all=len(reds), rows="\n".join(rows))


def copy_tree(folder: Path) -> Path:
    """Copies what the tests need."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the faults whose words or place have this in them")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree, each with a fault at a time")
    parser.add_argument("--write", type=Path, help="a page with what came of all faults")
    arguments = parser.parse_args()
    if arguments.write is not None and arguments.only:
        parser.error("--write is for all faults, without --only")
    chosen = [b for b in BREAKAGES if arguments.only in b.what or arguments.only in b.place]
    if not chosen:
        parser.error(f"no fault has {arguments.only!r} in its words or its place")
    reds: dict[str, str | None] = {}
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def run(breakage: Breakage) -> tuple[str | None, float]:
        tree, start = trees.get(), time.monotonic()
        try:
            return first_red(breakage, tree), time.monotonic() - start
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for job in range(arguments.jobs):
            trees.put(copy_tree(Path(folder, str(job))))
        for number, (breakage, (red, took)) in enumerate(zip(chosen, pool.map(run, chosen), strict=True), 1):
            reds[breakage.what] = red
            sys.stdout.write(f"{number}/{len(chosen)} {breakage.what} ({took:.0f} s): {red or 'NOT SEEN'}\n")
            sys.stdout.flush()
    if arguments.write is not None:
        arguments.write.write_text(page(reds), encoding="utf-8")
    unseen = [what for what, red in reds.items() if red is None]
    sys.stdout.write(f"{len(reds) - len(unseen)} of {len(reds)} seen\n")
    return len(unseen)


if __name__ == "__main__":
    sys.exit(main())
