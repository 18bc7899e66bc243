"""The page of options says what the configuration's docstrings say, of every field."""

from __future__ import annotations

from .options import PAGE, page


def test_the_page_is_written_from_the_docstrings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.docs.options"
