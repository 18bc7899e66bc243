"""One fault, and how its place in the package is found, whichever file it is in."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Breakage:
    """A fault, and the tests that fail with it.

    Attributes:
        what: in words, as in a bug report.
        place: the qualified name of a function, class or constant, without its module.
        before: a line of it, or a part of a line.
        after: the replacement.
        tests: the arguments of pytest.
    """

    what: str
    place: str
    before: str
    after: str
    tests: tuple[str, ...]

    def apply(self, package: Path) -> tuple[Path, str]:
        """Returns the file to change and its text with the fault; the file itself stays as it is."""
        places = _places(package).get(self.place, [])
        hits = []
        for path, first, last in places:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            hits += [(path, lines, n) for n in range(first - 1, last) for _ in range(lines[n].count(self.before))]
        if not places:
            raise ValueError(f"{self.what}: {package.name} has no function, class or constant {self.place}")
        if len(hits) != 1:
            raise ValueError(f"{self.what}: {self.place} has {len(hits)} times, not once: {self.before!r}")
        [(path, lines, n)] = hits
        lines[n] = lines[n].replace(self.before, self.after)
        return path, "".join(lines)


def read(catalogue: Path) -> tuple[Breakage, ...]:
    """Returns the faults of a file as catalogue.txt, whose head says what an entry looks like."""
    blocks = catalogue.read_text(encoding="utf-8").split("\n\n")
    return tuple(_entry(*map(str.strip, block.strip().split("\n"))) for block in blocks if not block.startswith("#"))


def _entry(what: str, where: str, before: str, after: str = "+ pass") -> Breakage:
    place, *tests = where.split()
    if not (before.startswith("- ") and after.startswith("+")):
        raise ValueError(f"{what}: expected a line with '- ' and one with '+', found {before!r} and {after!r}")
    return Breakage(what, place, before[2:], after[2:], tuple(tests))


@functools.cache
def _places(package: Path) -> dict[str, list[tuple[Path, int, int]]]:
    """Returns the file, first line and last line of each definition, by qualified name; several may have one name."""
    places = collections.defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for name, node in _definitions(ast.parse(path.read_text(encoding="utf-8")), ""):
            places[name].append((path, node.lineno, node.end_lineno or node.lineno))
    return places


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((prefix + target.id, child) for target in targets if isinstance(target, ast.Name))
        else:
            yield from _definitions(child, prefix)


BREAKAGES = read(Path(__file__).with_name("catalogue.txt"))
