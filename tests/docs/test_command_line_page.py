"""docs/reference/cli.md is the commands' own help, and each begins with an example that the command accepts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from megastrategy.tools.commands import root

from .command_line import PAGE, commands, help_of, page


def test_the_page_is_the_commands_help() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m tests.docs.command_line"


@pytest.mark.parametrize("words", [(), ("checkpoint",), *commands()], ids=" ".join)
def test_help_begins_with_an_example(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options are options of the command: only files are missing when it runs in an empty folder."""
    first, *_ = help_of(words).splitlines()
    assert first.startswith(f"Example: {' '.join(('megastrategy', *words))}")
    if words == ("config",):
        return  # it asks questions
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(root, shlex.split(first.removeprefix("Example: megastrategy ")))
    assert result.exit_code != 0
    assert "No such option" not in result.stderr
    assert any(
        word in result.stderr for word in ("does not exist", "is not there", "not found", "no file", "No such file")
    ), result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "bogus",
        "--bogus",
        "plan --bogus",
        "plan",
        "profile",
        "tune missing.py",
        "checkpoint bogus",
        "checkpoint inspect",
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(arguments: str) -> None:
    result = CliRunner().invoke(root, arguments.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: ")
