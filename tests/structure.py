"""``python -m tests.structure``: the size of the package and its tests, and the imports between folders of core.

Lines are those of files, code is without docstrings, comments and blank lines. An arrow is a folder of core, or a file
beside them, that imports another.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from .test_architecture import CORE, PACKAGE, ROOMS_OF_CORE, imports, resolved

TESTS = Path(__file__).parent


def code_lines(text: str) -> int:
    """Returns the number of lines without blank lines, comments and docstrings."""
    documentation = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in documentation
        for number, line in lines
    )


def arrows() -> set[tuple[str, str]]:
    found = set()
    for path in CORE.rglob("*.py"):
        own = path.relative_to(CORE).parts[0].removesuffix(".py")
        for name in imports(path, for_types=True):
            if name.startswith("."):
                target = resolved(path, name).split(".")
                found |= {(own, target[1])} if len(target) > 1 and target[1] != own else set()
    return {(own, other) for own, other in found if own != "__init__"}


def main() -> None:
    say = sys.stdout.write
    for name, folder in (("core", CORE), ("package", PACKAGE), ("tests", TESTS)):
        texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
        code = sum(map(code_lines, texts))
        say(f"{name:8}{len(texts):5} files{sum(text.count(chr(10)) for text in texts):8} lines{code:8} of code\n")
    entries = [path for path in CORE.iterdir() if path.suffix == ".py" or path.name in ROOMS_OF_CORE]
    say(f"core    {len(entries):5} folders and files at its top, {len(arrows())} arrows between them\n")


if __name__ == "__main__":
    main()
