"""Plain English, as far as a machine can see it: short first sentences, actors by name, tables that fit a screen."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import PAGES, ROOT

TOPS = ("megastrategy", "benchmarks", "examples", "tests")
SOURCES = sorted({path for top in TOPS for path in (ROOT / top).rglob("*.py")} - {Path(__file__).resolve()})
"""Without this file, which has the words that it looks for."""
MOST_WORDS = 25
"""Of the first sentence of a docstring."""
WIDEST_ROW = 240
"""Characters of a row of a table, without the targets of its links. Cells break into lines, and test_site.py checks
that no table scrolls sideways, but a longer row is a paragraph."""
GENERATED = ("CHANGELOG.md", "breakages.md", "compatibility.md", "optimizers.md")
"""Pages whose rows quote tests and error messages, or are a record."""

VAGUE = re.compile(r"\b(whoever|nobody|somebody)\b", re.IGNORECASE)
"""Name the actor: the first reader, user code, no rank."""
DIALECT = re.compile(
    r"\b(of which|of those|of theirs|(?:is|are|was|were) told|tells|lies|stands|but for|would else|in the place of)\b",
    re.IGNORECASE,
)
"""Split the sentence; write reports, returns, is stored, except, in place of."""
CLAUSE = re.compile(r"(What|Of|Where|Those)\b")
"""A docstring begins with a verb or with the noun that it documents."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def docstrings(source: str) -> list[tuple[int, str]]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [(getattr(node, "lineno", 1), text) for node in nodes if (text := ast.get_docstring(node))]


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.:;])\s", paragraph, maxsplit=1)[0]


@functools.cache
def comments(source: str) -> list[tokenize.TokenInfo]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in tokens if token.type == tokenize.COMMENT]


def ends_of_comments(source: str) -> Iterator[tuple[int, str]]:
    """The last line of each comment of several lines."""
    lines = source.splitlines()
    alone = [token for token in comments(source) if lines[token.start[0] - 1].lstrip()[0] == "#"]
    places = {token.start for token in alone}
    for token in alone:
        line, column = token.start
        if (line - 1, column) in places and (line + 1, column) not in places:
            yield line, token.string.lstrip("# ")


def prose(page: Path) -> str:
    """The page without its code and the targets of its links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`\n]*`", lambda code: "`" + "x" * (len(code[0]) - 2) + "`", text)


def not_plain(source: str) -> Iterator[tuple[int, str]]:
    """The lines and reasons."""
    yield from ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1) if VAGUE.search(line))
    words = [(token.start[0], token.string) for token in comments(source)] + [*docstrings(source)]
    yield from ((line, match[0]) for line, text in words for match in DIALECT.finditer(text))
    for line, text in docstrings(source):
        sentence = first_sentence(text)
        if len(sentence.split()) > MOST_WORDS:
            yield line, f"the first sentence has {len(sentence.split())} words: {sentence}"
        if CLAUSE.match(text):
            yield line, f"begins with a clause: {sentence}"
    yield from ((line, f"ends in {end!r}") for line, end in ends_of_comments(source) if len(end.split()) <= 2)


def test_docstrings_and_comments_are_plain() -> None:
    sources = ((path, path.read_text(encoding="utf-8")) for path in SOURCES)
    found = [f"{name(path)}:{line}: {reason}" for path, source in sources for line, reason in not_plain(source)]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_are_plain(page: Path) -> None:
    text = prose(page)
    assert [found[0] for pattern in (VAGUE, DIALECT) for found in pattern.finditer(text)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=name)
def test_no_table_is_wider_than_a_screen(page: Path) -> None:
    rows = [line for line in prose(page).splitlines() if line.startswith("|") and len(line) > WIDEST_ROW]
    assert rows == []
