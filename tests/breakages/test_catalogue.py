"""The catalogue of faults keeps up with the code that they are put into."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megastrategy

from .breakage import Breakage
from .catalogue import BREAKAGES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.what)
def test_a_fault_has_its_place_and_is_a_fault_at_run_time(breakage: Breakage) -> None:
    path = Path(megastrategy.__file__).parent / breakage.file
    broken = breakage.apply(path.read_text(encoding="utf-8"))
    ast.parse(broken)
    for tests in breakage.tests.split(" --")[0].split():
        assert (ROOT / tests).is_file()


def test_no_fault_is_named_twice() -> None:
    assert len({breakage.what for breakage in BREAKAGES}) == len(BREAKAGES)
