"""Examples run from a clone that is not installed, without PYTHONPATH."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.scripts import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_clone_is_on_the_path_before_the_package_is_imported(path: Path) -> None:
    if imported := re.search(r"^(from|import) megastrategy", path.read_text(), re.MULTILINE):
        appended = "sys.path.append(str(Path(__file__).resolve().parents[1]))"
        assert -1 < path.read_text().find(appended) < imported.start()
