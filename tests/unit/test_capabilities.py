"""Every file of tests is found by what it is about."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest

from tests.support.capabilities import CAPABILITIES, TESTS, capabilities

FILES = sorted(TESTS.rglob("test_*.py"))
PAGE = TESTS.parent / "docs" / "design" / "testing.md"


def test_every_file_is_about_something() -> None:
    assert not [str(path) for path in FILES if not capabilities(path)]


def test_every_pattern_finds_a_file() -> None:
    names = [path.relative_to(TESTS).as_posix() for path in FILES]
    for row, patterns in CAPABILITIES.items():
        assert not [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)], row


def test_every_capability_is_registered_and_on_the_page(pytestconfig: pytest.Config) -> None:
    registered = [line.partition(":")[0] for line in pytestconfig.getini("markers")]
    assert set(CAPABILITIES) <= set(registered)
    assert re.findall(r"^\| `-m (\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == list(CAPABILITIES)


def test_tests_are_marked_with_what_their_file_is_about(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("structure") is not None
    assert request.node.get_closest_marker("checkpoints") is None
