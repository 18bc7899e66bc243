"""Figures of pages that a command computes are those that it prints."""

from __future__ import annotations

import re

from benchmarks.memory_table import BF16, FP32, table

from . import ROOT


def test_memory_page_has_the_printed_table() -> None:
    assert table() in (ROOT / "docs" / "memory.md").read_text()


def test_readme_has_the_bytes_of_eight_ranks() -> None:
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (?:bytes per parameter on one of 8|with bf16 weights)[^|]*(.*)$", text, re.MULTILINE)
    for row, methods in zip(rows, (FP32, BF16), strict=True):
        assert sorted(re.findall(r"[\d.]+", row)) == sorted(f"{method.bytes_on(8):.4g}" for method in methods)
