"""Names on the pages on design exist: files, classes, functions, tests, notes."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import ROOT

PACKAGE = ROOT / "megastrategy"
NAMED = [ROOT / "docs" / "design" / name for name in ("one_gradient.md", "faults.md")]
NOT_OURS = {"grad_dtype", "dtype"}
"""Attributes of torch's that these pages name."""


def spoken(page: Path) -> str:
    """The page without its blocks of code, which are run or are drawings."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def quoted(page: Path) -> list[str]:
    return sorted(set(re.findall(r"`([^`\n]+)`", spoken(page))))


class Names:
    """The names in the package's source: of modules, classes and functions, and of what classes have."""

    def __init__(self) -> None:
        self.plain: set[str] = set()
        self.members: dict[str, set[str]] = {}
        self.bases: dict[str, list[str]] = {}
        for path in PACKAGE.rglob("*.py"):
            self.plain.add(path.stem)
            self._read(ast.parse(path.read_text(encoding="utf-8")))
        for members in self.members.values():
            self.plain |= members

    def _read(self, tree: ast.Module) -> None:
        for node in tree.body:
            self.plain.update(_bound(node))
            if isinstance(node, ast.ClassDef):
                self.members.setdefault(node.name, set()).update(_members(node))
                self.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def has(self, name: str) -> bool:
        """``function``, ``Class``, ``Class.member`` (inherited, too)."""
        owner, dot, member = name.partition(".")
        if not dot:
            return name in self.plain
        if owner not in self.members:
            return False
        return member in self.members[owner] or any(self.has(f"{base}.{member}") for base in self.bases[owner])


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _members(kind: ast.ClassDef) -> Iterator[str]:
    for node in kind.body:
        yield from _bound(node)
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield node.attr


@pytest.fixture(scope="module")
def names() -> Names:
    return Names()


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.stem)
def test_names_are_in_the_package(page: Path, names: Names) -> None:
    found = [name for name in quoted(page) if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?", name)]
    assert len(found) > 15
    missing = [name for name in found if not names.has(name) and name not in NOT_OURS and not hasattr(builtins, name)]
    assert not missing


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.stem)
def test_files_and_tests_are_there(page: Path) -> None:
    paths = [name for name in quoted(page) if re.fullmatch(r"[\w./]+\.py(::\w+)?", name)]
    assert paths
    for path, _, test in (name.partition("::") for name in paths):
        file = ROOT / path if path.startswith("tests/") else PACKAGE / path
        assert file.exists(), path
        assert not test or f"\ndef {test}(" in file.read_text(encoding="utf-8"), f"{path}::{test}"


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.stem)
def test_what_stands_beside_a_file_is_in_it(page: Path) -> None:
    """In a row of a table that leads to files each name has its class, or itself, in one of them."""
    rows = re.findall(r"^\|.*\]\(\.\./\.\./megastrategy/.*$", spoken(page), re.MULTILINE)
    assert len(rows) > 5
    for row in rows:
        files = [PACKAGE / path for path in re.findall(r"\]\(\.\./\.\./megastrategy/([\w./]+\.py)\)", row)]
        # A folder is named by its __init__, and has what its files have.
        sources = [path for file in files for path in (file.parent.glob("*.py") if file.stem == "__init__" else [file])]
        bound = {
            name
            for path in sources
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            for name in _bound(node)
        }
        for name in re.findall(r"`([A-Za-z_]\w*)(?:\.\w+)?`", row):
            assert name in bound, f"{name} is not in {[str(file.relative_to(PACKAGE)) for file in files]}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_notes_that_pages_cite_are_in_the_source(page: Path) -> None:
    cited = {" ".join(note.split()) for note in re.findall(r"\[Note: ([^\]]+)\]", spoken(page))}
    source = " ".join(" ".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")).split())
    assert all(f"[Note: {note}] " in source for note in cited), cited
