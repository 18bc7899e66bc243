"""docs/reference/cli.md is the commands' own help, and each begins with an example that the command accepts."""

from __future__ import annotations

from .command_line import PAGE, page


def test_the_page_is_the_commands_help() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m tests.docs.command_line"
