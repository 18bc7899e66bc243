"""The site of the pages and of the public names: ``make docs`` builds it into build/docs. Warnings are errors there."""

import importlib.metadata
import os
from pathlib import Path

from sphinx.project import Project

project = "megastrategy"
copyright = "the authors of megastrategy"
version = release = importlib.metadata.version("megastrategy")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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
html_show_sourcelink = False

_name_with_folder = Project.path2doc


def _name_of_page(self: Project, filename: str | Path) -> str | None:
    """Names docs/lightning.md "lightning", so that the site begins at build/docs/index.html, one folder higher."""
    name = _name_with_folder(self, filename)
    return name and name.removeprefix("docs/")


Project.path2doc = _name_of_page

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
