"""Links of every page lead somewhere, and what names a version or a command names one that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megastrategy

from . import PAGES, ROOT


def links(page: Path) -> list[str]:
    """Without those that leave the repository, and without blocks of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = sorted(set(re.findall(r"(?<!`)\]\(([^)\s]+)\)", text)))
    return [link for link in found if not re.match(r"https?:", link)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_version_stands_everywhere() -> None:
    version = megastrategy.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
