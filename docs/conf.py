"""The site of the pages and of the public names: ``make docs`` builds it into build/docs. Warnings are errors there."""

import importlib.metadata
import os
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx
from sphinx.project import Project

URLS = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]["urls"]

project = "megastrategy"
copyright = "the authors of megastrategy"
version = release = importlib.metadata.version("megastrategy")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "index"
# The repository is the source, so that links from pages to files and tests lead somewhere.
include_patterns = [
    "docs/**",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "AGENTS.md",
    "benchmarks/README.md",
    "examples/README.md",
]
myst_heading_anchors = 3
myst_enable_extensions = ["html_image"]  # the README's picture has a width
suppress_warnings = ["myst.header"]  # a page may leave out a level
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
html_theme = "furo"
html_title = f"megastrategy {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["names_and_tables.js"]
html_search_scorer = str(Path(__file__).with_name("_static") / "scorer.js")
html_baseurl = f"{URLS['Documentation']}/"
# What is typed, not what it prints.
copybutton_selector = "div:not(.highlight-text, .highlight-diff) > div.highlight > pre"
html_show_sourcelink = False

_name_with_folder = Project.path2doc


def _name_of_page(self: Project, filename: str | Path) -> str | None:
    """Names docs/lightning.md "lightning", so that the site begins at build/docs/index.html, one folder higher."""
    name = _name_with_folder(self, filename)
    return name and name.removeprefix("docs/")


Project.path2doc = _name_of_page


def _link_to_repository(app: Sphinx, doctree: nodes.document) -> None:
    """Lets links to files that are no pages lead to the repository; myst would make downloads of them."""
    for link in list(doctree.findall(download_reference)):
        path, _ = app.env.relfn2path(link["reftarget"], app.env.docname)
        link.replace_self(nodes.reference("", "", *link.children, refuri=f"{URLS['Homepage']}/blob/main/{path}"))


def _link_to_source(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Says where a page is edited: its name lacks the folder, see ``_name_of_page``."""
    if page in app.env.found_docs:
        context["theme_source_edit_link"] = f"{URLS['Homepage']}/edit/main/{app.env.doc2path(page, base=False)}"


def _write_sitemap(app: Sphinx, exception: Exception | None) -> None:
    pages = "".join(f"<url><loc>{html_baseurl}{page}.html</loc></url>\n" for page in sorted(app.env.found_docs))
    schema = "http://www.sitemaps.org/schemas/sitemap/0.9"
    (Path(app.outdir) / "sitemap.xml").write_text(f'<urlset xmlns="{schema}">\n{pages}</urlset>\n')


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _link_to_repository, priority=100)  # before downloads are collected
    app.connect("html-page-context", _link_to_source)
    app.connect("build-finished", _write_sitemap)


# INTERSPHINX=1 makes links of other packages' names, and fetches their inventories for it. It is asked for and never
# tried: a build has to pass without a network, where an inventory that cannot be had is a warning, and so an error.
if os.environ.get("INTERSPHINX") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3/", None),
        "torch": ("https://docs.pytorch.org/docs/stable/", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable/", None),
        "accelerate": ("https://huggingface.co/docs/accelerate/main/en/", None),
    }
