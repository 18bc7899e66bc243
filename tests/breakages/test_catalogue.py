"""The catalogue of faults keeps up with the code that they are put into."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import megastrategy

from .breakage import BREAKAGES, Breakage

ROOT = Path(__file__).parents[2]


@functools.cache
def dumped(path: Path) -> str:
    return ast.dump(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.what)
def test_a_fault_has_one_place_and_changes_what_is_run(breakage: Breakage) -> None:
    path, broken = breakage.apply(Path(megastrategy.__file__).parent)
    tree = ast.parse(broken)
    assert ast.dump(tree) != dumped(path)
    compile(tree, path, "exec")
    files = [argument for argument in breakage.tests if argument.startswith("tests/")]
    assert files
    for file in files:
        assert (ROOT / file).is_file(), f"{file} is not there"


def test_no_fault_is_named_twice() -> None:
    assert len({breakage.what for breakage in BREAKAGES}) == len(BREAKAGES)
