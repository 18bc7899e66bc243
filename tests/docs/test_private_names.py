"""Every private name of other packages is known, and is where it is looked for in the installed versions."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.support.private_names import LIVES_IN, NOT_YET, PAGE, lives, page, uses

KNOWN = [(where, name) for where, names in LIVES_IN.items() for name in names.split()]


@pytest.mark.parametrize(("where", "name"), KNOWN)
def test_it_is_there(where: str, name: str) -> None:
    torch = tuple(map(int, importlib.metadata.version("torch").split("+")[0].split(".")[:2]))
    is_there = name not in NOT_YET or torch >= tuple(map(int, NOT_YET[name].split(".")))
    assert lives(name, where) == is_there


def test_none_is_used_that_is_not_in_the_table() -> None:
    assert set(uses()) == {name for _, name in KNOWN}


def test_the_page_is_what_the_source_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m tests.support.private_names"
