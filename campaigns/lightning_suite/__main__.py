"""Runs Lightning's own tests with a strategy in place of "auto", or compares two such runs.

python -m campaigns.lightning_suite run LIGHTNING/tests/tests_pytorch STRATEGY OUTCOMES [pytest's options]
python -m campaigns.lightning_suite compare OUTCOMES_OF_DDP OUTCOMES_OF_OURS
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

import megastrategy  # noqa: F401 - registers the strategies' names

from .substitution import Outcomes, in_place_of_auto, read_outcomes

FOLDERS = ["trainer", "loops", "callbacks", "models", "core", "--ignore=models/test_onnx.py"]
"""What trains. One file needs packages for ONNX, and nothing of a strategy."""


def run(folder: Path, strategy: str, outcomes: Path, arguments: list[str]) -> int:
    """``"auto"`` changes nothing. Lightning's own settings for pytest hold, which stand beside its tests."""
    plugin = Outcomes(outcomes.resolve())
    os.chdir(folder)
    arguments = ["-q", "--timeout=60", "-p", "no:cacheprovider", *(arguments or FOLDERS)]
    if strategy == "auto":
        return int(pytest.main(arguments, plugins=[plugin]))
    with in_place_of_auto(strategy):
        return int(pytest.main(arguments, plugins=[plugin]))


def compare(theirs: Path, ours: Path) -> int:
    """Prints the tests that fail in the second run and not in the first; their number is the exit status."""
    first, second = read_outcomes(theirs), read_outcomes(ours)
    for file, outcomes in (theirs, first), (ours, second):
        tell(f"{file.name}: {dict(Counter(line['outcome'] for line in outcomes.values()))}")
    missing = sorted(first.keys() - second.keys())
    red = [test for test, line in second.items() if line["outcome"] == "failed" and not _failed(first, test)]
    green = [test for test, line in first.items() if line["outcome"] == "failed" and not _failed(second, test)]
    tell(f"{len(red)} fail in the second run only, {len(green)} in the first only; {len(missing)} did not run again")
    for test in red:
        tell(f"{test}\n    {second[test]['message'][:300]}")
    for test in green:
        tell(f"first only: {test}")
    return min(len(red) + len(missing), 100)


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _failed(outcomes: dict[str, dict[str, str]], test: str) -> bool:
    return test in outcomes and outcomes[test]["outcome"] == "failed"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", folder, strategy, outcomes, *arguments]:
            sys.exit(run(Path(folder), strategy, Path(outcomes), arguments))
        case ["compare", theirs, ours]:
            sys.exit(compare(Path(theirs), Path(ours)))
        case _:
            sys.exit(__doc__)
