"""Links of every page lead somewhere, and what names a version or a command names one that is there."""

from __future__ import annotations

import re
import tomllib
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


def test_pages_are_found_from_the_first_one() -> None:
    """By links, over other pages too."""
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        reached.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link[0] != "#"}
        left += sorted(target for target in targets - reached if target.suffix == ".md")
    assert reached == set(PAGES)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_make_has_the_targets_that_pages_name(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"(?:^|`)make (\w[\w-]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_version_stands_everywhere() -> None:
    version = megastrategy.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_licence_is_the_one_that_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    [name] = project["license-files"]
    assert "Apache License\n                           Version 2.0, January 2004" in (ROOT / name).read_text()


def test_the_site_has_every_page() -> None:
    """``make docs`` fails for a page that is in no list; this test finds it without Sphinx."""
    docs = ROOT / "docs"
    index = (docs / "index.rst").read_text(encoding="utf-8")
    listed = re.findall(r"^   (?:[\w ]+ <)?([\w./]+)>?$", index, re.MULTILINE)
    files = [folder / f"{name}.{kind}" for name in listed for folder in (docs, ROOT) for kind in ("md", "rst")]
    assert {path for path in files if path.exists()} == {*PAGES, docs / "reference" / "api.rst"}
