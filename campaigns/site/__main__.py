"""Opens the built site in a browser: no page scrolls sideways on a telephone, and searches find their page.

    make docs && pip install playwright && apt-get install chromium
    python -m campaigns.site build/docs --browser /usr/bin/chromium --out runs/site

Writes pictures of some pages at two widths and in both themes into OUT, prints faults, and ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

PHONE, DESK = 390, 1280  # pixels
PICTURES = ("index", "install", "tutorial", "gradients", "speed", "reference/options", "reference/api/plain_loop")
FIRST_RESULTS = {
    "install": "install.html",
    "clip": "gradients.html",
    "resume": "checkpoints.html",
    "checkpoint": "checkpoints.html",
    "OOM": "memory.html",
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def serve(folder: Path) -> str:
    """The address of the folder; a thread serves it until the process ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def too_wide(page: Any, address: str, names: list[str]) -> Iterator[str]:
    page.set_viewport_size({"width": PHONE, "height": 844})
    for name in names:
        page.goto(f"{address}/{name}.html")
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > PHONE:
            yield f"{name}: {width} pixels wide at {PHONE}"


def not_found(page: Any, address: str) -> Iterator[str]:
    for words, expected in FIRST_RESULTS.items():
        page.goto(f"{address}/search.html?q={words}")
        page.wait_for_selector("#search-results ul.search li a")
        found = page.eval_on_selector("#search-results ul.search li a", "link => link.pathname")
        if found.lstrip("/") != expected:
            yield f"the first result for {words!r} is {found}, not {expected}"


def missing(page: Any, address: str) -> Iterator[str]:
    """What is on a page only if its scripts run."""
    page.goto(f"{address}/reference/tried_optimizers.html")
    rows = "document.querySelectorAll('.table-filter ~ table tbody tr:not([hidden])').length"
    num_rows = page.evaluate(rows)
    page.fill(".table-filter", "muon whole")
    if not 0 < page.evaluate(rows) < num_rows:
        yield f"the filter of the optimizers' table leaves {page.evaluate(rows)} of {num_rows} rows"
    page.goto(f"{address}/install.html")
    if page.locator("button.copybtn").count() == 0:
        yield "blocks have no button that copies them"


def take_pictures(browser: Any, address: str, out: Path) -> None:
    for theme in ("light", "dark"):
        for width in (DESK, PHONE):
            page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": 844})
            for name in PICTURES:
                page.goto(f"{address}/{name}.html")
                page.screenshot(path=out / f"{name.replace('/', '_')}_{width}_{theme}.png")
            page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", default="/usr/bin/chromium", help="a Chromium")
    parser.add_argument("--out", type=Path, default=Path("runs/site"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    address = serve(args.site)
    pages = [page.relative_to(args.site) for page in args.site.rglob("*.html") if "_static" not in page.parts]
    names = sorted(str(page.with_suffix("")) for page in pages if not page.name.startswith(("genindex", "search")))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(f"{page.url}: {error}"))
        faults = [*too_wide(page, address, names), *not_found(page, address), *missing(page, address), *errors]
        take_pictures(browser, address, args.out)
        browser.close()
    sys.stdout.write("".join(f"{fault}\n" for fault in faults) or f"{len(names)} pages: no fault\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
