"""The page of options says what the configuration's docstrings say, of every field."""

from __future__ import annotations

import ast
import re

from megastrategy import DistributedDataParallelConfig
from megastrategy.core import field_names

from .options import PAGE, field_docstrings, page


def test_every_field_has_a_docstring() -> None:
    assert tuple(field_docstrings()) == field_names()
    assert all(field_docstrings().values())


def test_the_page_is_written_from_the_docstrings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.docs.options"


def test_the_table_has_every_default() -> None:
    """As code that makes the default configuration."""
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\1\) \| `(.+?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert tuple(name for name, _ in rows) == field_names()
    defaults = {name: ast.literal_eval(default) for name, default in rows}
    assert DistributedDataParallelConfig(**defaults) == DistributedDataParallelConfig()


def test_nothing_of_restructured_text_is_left() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r":\w+:`|(?<!`)``(?!`)", text)
