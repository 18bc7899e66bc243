"""The workflow runs the versions of docs/project/versions.md, and no version that was not run."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
Versions = tuple[str, str]
"""Of torch, and Python's first two numbers."""


def in_table() -> dict[Versions, str]:
    """The runs, by versions."""
    page = (ROOT / "docs" / "project" / "versions.md").read_text()
    rows = re.findall(r"^\| (2\.\d+\.\d+) \| (3\.\d+)\.\d+ \| ([^|]+) \|", page, flags=re.MULTILINE)
    return {(torch, python): what for torch, python, what in rows}


def test_the_workflow_has_the_versions_that_the_suite_was_run_with() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    entries = workflow["jobs"]["suite"]["strategy"]["matrix"]["include"]
    in_workflow = {(entry["torch"], entry["python"]) for entry in entries}
    assert len(in_workflow) == len(entries)
    assert in_workflow == {versions for versions, what in in_table().items() if what.startswith("whole suite")}


def test_the_oldest_torch_that_may_be_installed_is_one_that_was_run() -> None:
    oldest = re.search(r'^dependencies = \["torch>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert oldest is not None
    passed = [torch for (torch, _), what in in_table().items() if what.startswith("whole suite")]
    assert min(passed, key=lambda torch: tuple(map(int, torch.split(".")))).startswith(oldest[1] + ".")
