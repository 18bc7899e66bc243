"""The site that ``make docs`` builds, in a real browser at the width of a desk and of a telephone."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.patience import HANG_S
from . import PAGES, ROOT

pytestmark = [pytest.mark.long, pytest.mark.fresh]

WIDTHS = {"desk": 1280, "telephone": 390}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a warning of Sphinx is an error, as in ``make docs``."""
    missing = [name for name in ("sphinx", "furo", "myst_parser") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {missing[0]}: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-b", "html", "-c", "docs", "."]
    done = subprocess.run([*command, folder], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site, served on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Writes nothing: a line per request is noise among the results of tests."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium, without a window."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[nightly]'")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(params=WIDTHS)
def page(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    """A tab on the first page; an error of a script, or a request to another machine, fails the test."""
    context = browser.new_context(viewport={"width": WIDTHS[request.param], "height": 900}, base_url=address)
    tab, problems = context.new_page(), list[str]()
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda sent: None if sent.url.startswith((address, "data:")) else problems.append(sent.url))
    tab.goto("/index.html")
    yield tab
    context.close()
    assert problems == []


def open_sidebar(page: Any) -> None:
    if page.viewport_size["width"] < 1000:
        page.locator("label.nav-overlay-icon").click()


def test_the_first_page_shows_the_change_three_figures_and_six_doors(page: Any) -> None:
    assert page.locator("h1").first.inner_text().startswith("megastrategy")
    assert 'strategy="megatron_ddp"' in page.locator(".highlight-diff").inner_text()
    assert page.locator(".figures > ul > li").count() == 3
    assert page.locator(".cards:not(.figures) > ul > li").count() == 6
    assert page.locator("article img").evaluate("image => image.complete && image.naturalWidth > 0")


def test_no_page_scrolls_sideways(page: Any, site: Path) -> None:
    """Nor does a table inside its page at the width of a desk."""
    names = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    assert len(names) >= len(PAGES)
    too_wide = {}
    for name in names:
        page.goto(f"/{name}")
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > page.viewport_size["width"]:
            too_wide[name] = width
        elif page.viewport_size["width"] == WIDTHS["desk"]:
            tables = "[...document.querySelectorAll('.table-wrapper')].filter(t => t.scrollWidth > t.clientWidth + 1)"
            if excess := page.evaluate(f"{tables}.map(table => table.innerText.slice(0, 60))"):
                too_wide[name] = excess
    assert too_wide == {}


def test_every_page_is_in_the_sidebar(page: Any) -> None:
    """Its links lead from page to page."""
    open_sidebar(page)
    entries = page.locator(".sidebar-tree a.reference")
    assert entries.count() == len(PAGES) + 1, "the pages, and the public names, which are not Markdown"
    entries.filter(has_text="Lightning").first.click()
    page.wait_for_url("**/lightning.html")
    assert page.locator("h1").first.inner_text().startswith("Lightning")


def test_a_search_finds_a_page(page: Any) -> None:
    open_sidebar(page)
    field = page.locator(".sidebar-search")
    field.fill("ReducedGradError")
    field.press("Enter")
    results = page.locator("#search-results li a")
    results.first.wait_for()
    errors = page.locator("#search-results a[href*='reference/errors.html']").first
    errors.wait_for()
    errors.click()
    page.wait_for_url("**/reference/errors.html*")
    assert page.locator("h1").first.inner_text().startswith("Errors")
