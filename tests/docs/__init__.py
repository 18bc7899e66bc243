"""The pages of the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for folder in ("", "docs/**/", "benchmarks/", "examples/") for page in ROOT.glob(f"{folder}*.md"))
