"""The catalogue of faults keeps up with the code that they are put into."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import megastrategy

from .breakage import BREAKAGES, Breakage, read

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


PACKAGE = """
LIMIT = 3
class A:
    def f(self):
        def g():
            return 1  # once
        a = g()
        b = g()
        return a + b
    @property
    def size(self):
        return self._size
    @size.setter
    def size(self, size):
        self._size = size + 1
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text(PACKAGE)
    return tmp_path / "package"


@pytest.mark.parametrize(
    ("entry", "before", "after"),
    [
        ("A.f tests/a.py\n    - a = g()", "a = g()", "pass"),
        ("A.f.g tests/a.py\n    - 1\n    + 2", "return 1", "return 2"),
        ("A.f tests/a.py\n    - + b\n    +", "a + b", "a "),
        ("A.size tests/a.py\n    - size + 1\n    + size", "size + 1", "size"),  # the setter's only
        ("LIMIT tests/a.py -k one\n    - 3\n    + 4", "LIMIT = 3", "LIMIT = 4"),
    ],
)
def test_a_place_is_found_by_name_and_a_line(package: Path, entry: str, before: str, after: str) -> None:
    (package / "catalogue.txt").write_text(f"# head\n#\n\nwords\n    {entry}\n\n# a section\n")
    [breakage] = read(package / "catalogue.txt")
    assert breakage.apply(package) == (package / "a.py", PACKAGE.replace(before, after))


@pytest.mark.parametrize(
    ("place", "before", "message"),
    [
        ("A.h", "pass", "package has no function, class or constant A.h"),
        ("A.f", "g()", "A.f has 3 times, not once: 'g()'"),
        ("A.f", "h()", "A.f has 0 times, not once: 'h()'"),
    ],
)
def test_a_place_that_is_not_one_is_refused(package: Path, place: str, before: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"words: {message}")):
        Breakage("words", place, before, "pass", ()).apply(package)


def test_an_entry_without_a_line_of_code_is_refused(package: Path) -> None:
    (package / "catalogue.txt").write_text("words\n    A.f tests/a.py\n    a = g()\n")
    with pytest.raises(ValueError, match="words: expected a line with '- '"):
        read(package / "catalogue.txt")
