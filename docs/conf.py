"""The site of the pages and of the public names: ``make docs`` builds it into build/docs. Warnings are errors there."""

import importlib.metadata

project = "megastrategy"
version = release = importlib.metadata.version("megastrategy")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
# The repository is the source, so that links from pages to files and tests lead somewhere.
include_patterns = ["docs/**", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a page may leave out a level
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
html_theme = "furo"
html_title = f"megastrategy {version}"
