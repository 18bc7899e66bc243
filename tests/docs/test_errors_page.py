"""docs/reference/errors.md has a section for each error, and the messages that it shows are those of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import pytest

from megastrategy import errors

from . import ROOT

PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
NAMES = sorted(set(errors.__all__) - {"MegastrategyError"})

Template = Sequence[str | None]
"""The constant parts of a string; None is a value that is filled in."""


def templates() -> Iterator[Template]:
    for path in (ROOT / "megastrategy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp) and (parts := list(parts_of(node))):
                yield parts


def parts_of(node: ast.expr) -> Iterator[str | None]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield from (value.value if isinstance(value, ast.Constant) else None for value in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from (*parts_of(node.left), *parts_of(node.right))
    else:
        yield None


def num_constant(parts: Template, text: str) -> int:
    """Returns how many characters of ``text`` are constant if it begins a string of these parts, and -1 otherwise."""
    if not text or not parts:
        return 0 if not text else -1
    first, rest = parts[0], parts[1:]
    if first is None:
        following = rest[0] if rest and rest[0] else ""
        ends = [end for end in range(1, len(text)) if text.startswith(following[:8], end)] if following else []
        return max(num_constant(rest, text[end:]) for end in (*ends, len(text)))
    if text.startswith(first):
        found = num_constant(rest, text[len(first) :])
        return -1 if found < 0 else len(first) + found
    return len(text) if first.startswith(text) else -1


def test_each_error_has_a_section_in_alphabetical_order() -> None:
    assert list(SECTIONS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_section_says_when_why_and_what_to_do(name: str) -> None:
    for heading in ("- **Raised** ", "- **Cause:** ", "- **What to do:** "):
        assert SECTIONS[name].count(heading) == 1, heading


def test_the_messages_are_those_of_the_source() -> None:
    """At least 20 characters of each are constant text of one string of the package."""
    known = list(templates())
    for name, section in SECTIONS.items():
        [message] = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
        candidates = [
            parts for parts in known if any(part and len(part) > 8 and part[:40] in message for part in parts)
        ]
        constant = max((num_constant(parts, message) for parts in candidates), default=0)
        assert constant >= 20, f"{name}: no string of the package begins like {message!r}"
