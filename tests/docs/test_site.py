"""The built site, which ``make nightly`` makes before its tests: no dead link, and what pages are found by."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from . import ROOT

SITE = ROOT / "build" / "docs"

pytestmark = pytest.mark.nightly


@cache
def html(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def ids(page: Path) -> frozenset[str]:
    return frozenset(re.findall(r'\bid="([^"]+)"', html(page)))


def test_links_lead_to_pages_and_ids() -> None:
    pages = [page for page in SITE.rglob("*.html") if "_static" not in page.parts]
    assert len(pages) > 60, "make docs"
    dead = []
    for page in pages:
        for link in re.findall(r'\b(?:href|src)="([^"]+)"', html(page)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            is_dead = not target.exists() or (parts.fragment and unquote(parts.fragment) not in ids(target))
            if is_dead and target.name != "searchindex.js":
                dead.append(f"{page.relative_to(SITE)}: {link}")
    assert dead == []


def test_sources_are_links_to_the_repository() -> None:
    assert not (SITE / "_downloads").exists()
    assert "/blob/main/tests/core/properties/test_memory.py" in html(SITE / "memory.html")
    assert "/edit/main/docs/memory.md" in html(SITE / "memory.html")
    assert "memory.html</loc>" in (SITE / "sitemap.xml").read_text(encoding="utf-8")
